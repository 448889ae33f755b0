"""YAML as a run spec is written in it: plain scalars mean what YAML 1.2's core schema says, and no key stands twice.

Flows in: text. Flows out: plain values. PyYAML speaks YAML 1.1, in which `010` is 8, `1:30` is 90, `yes` is true, a
date is no text and `1e-6` is; here these are 10, text, text, text and a number. There is
no merge key `<<`.
Invariant: what `dumped` writes reads back as the same values, under either version.
"""

import re
from typing import Any

import yaml

_SHOWN = 40
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_DIGITS = list("-+0123456789")
_IMPLICIT = (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, _DIGITS),
    ("float", _FLOAT, [*_DIGITS, "."]),
)
"""Tag, what is written so, and the characters with which that begins; the first that fits counts."""


class NotYaml(ValueError):
    """The text cannot be read; the message says why, on one line."""


def parsed(text: str) -> Any:
    """Raises NotYaml."""
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except RecursionError:
        raise NotYaml("nested too deeply") from None
    except yaml.YAMLError as error:
        raise NotYaml(" ".join(str(error).split())) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # of a tag that is written out, such as !!timestamp, before something else
        raise NotYaml(f"a value is not what its tag says: {' '.join(str(error).split())}") from None


def dumped(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win in silence; here it is an error."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's name and way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def integer(self, node: yaml.ScalarNode) -> int:
        text = self._matching(node, _INT, "integer")
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text[2:] if base != 10 else text, base)
        except ValueError:
            raise _not_a(node, f"number that can be read: it has {len(text)} digits") from None

    def real(self, node: yaml.ScalarNode) -> float:
        text = self._matching(node, _FLOAT, "number").lower()
        # Python writes the infinities and NaN without their dot
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def truth(self, node: yaml.ScalarNode) -> bool:
        return self._matching(node, _BOOL, "truth value, true or false").lower() == "true"

    def _matching(self, node: yaml.ScalarNode, written: re.Pattern[str], what: str) -> str:
        text = str(self.construct_scalar(node))
        if not written.match(text):
            raise _not_a(node, what)
        return text


def _not_a(node: yaml.ScalarNode, what: str) -> yaml.constructor.ConstructorError:
    shown = node.value if len(node.value) <= _SHOWN else f"{node.value[:_SHOWN]}…"
    return yaml.constructor.ConstructorError(None, None, f"{shown!r} is no {what}", node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version would take for something else."""


for _tag, _written, _first in _IMPLICIT:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _written, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _written, _first)
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.integer)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _CoreLoader.real)
_CoreLoader.add_constructor("tag:yaml.org,2002:bool", _CoreLoader.truth)
