"""Read a run spec: YAML file + `key=value` overrides → `RunSpec`, or a `SpecError` of plain lines.

Invariant: a key that the schema does not know never passes; the error names the nearest one it does know.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from slimerl.spec.schema import RunSpec
from slimerl.spec.yaml_core import NotYaml, dumped, parsed

_SHOWN = 80
"""Characters of a key, a value or an override in an error."""


class SpecError(Exception):
    """The spec cannot be used; the message has one line per fault, each naming the key."""


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Load and validate.

    Args:
        path: YAML file.
        overrides: `a.b.c=value`, the value in YAML syntax; they win over the file.

    Raises:
        SpecError: unreadable file, unknown key, wrong type or a combination that cannot work.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    return spec_from_tree(tree, str(path))


def spec_from_tree(tree: dict[str, Any], source: str) -> RunSpec:
    """Validate a tree of plain values; `source` names it in errors."""
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        raise SpecError("\n".join(f"{source}: {line}" for line in _plain_lines(error))) from None


def dump_spec(spec: RunSpec) -> str:
    """The spec as YAML that `load_spec` reads back to an equal one."""
    return dumped(spec.model_dump(mode="json", exclude_none=True))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot read the spec: {error.strerror}") from None
    except (NotYaml, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: a run spec is a mapping of sections, found {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SpecError(f"override '{_printable(override)}': write it as section.key=value")
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise SpecError(f"override '{_printable(override)}': '{section}' is a value, not a section")
    try:
        tree[leaf] = parsed(text)
    except NotYaml as error:
        raise SpecError(f"override '{_printable(override)}': its value is not valid YAML: {error}") from None


def _plain_lines(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        *sections, last = map(str, fault["loc"] or ("",))
        is_unknown = fault["type"] == "extra_forbidden"
        # A variant of a section stands in the place of a fault, but not in the file; an unknown key may look like one.
        parts = [part for part in sections if not _VARIANT.fullmatch(part)]
        parts += [last] if is_unknown or not _VARIANT.fullmatch(last) else []
        where = _printable(".".join(parts))
        if is_unknown:
            yield f"unknown key '{where}'{_misread(last) or _nearest(where)}"
        elif fault["type"] == "missing":
            yield f"'{where}' is missing"
        elif fault["type"] == "union_tag_invalid":
            known = re.findall(r"<(\w+)>", fault["ctx"]["expected_tags"])
            yield f"{where}.kind: {_unknown_kind(_printable(str(fault['input']['kind'])), known)}"
        elif fault["type"] == "model_type":
            yield f"'{where}' is a section of keys, found {_shortened(repr(fault['input']))}"
        else:
            message = _IN_YAML.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
            found = _shortened(repr(fault["input"]))
            shown = f" (found {found}{_unit_of(where)})" if where and _is_plain(fault["input"]) else ""
            yield f"{where + ': ' if where else ''}{message[:1].lower() + message[1:]}{shown}"


_VARIANT = re.compile(r"<\w+>")

_IN_YAML = {"is_instance_of": "a path is text", "tuple_type": "input should be a list"}
"""Kinds of faults that pydantic tells in words of Python."""


def _misread(key: str) -> str:
    """What a key is that only looks like one of this spec; empty: none of these."""
    if key == "<<":
        return "; a run spec has no merge keys, write the values out"
    return "; in a file each section stands by itself, its keys indented below it" if "." in key else ""


def _printable(text: str) -> str:
    """On one line, and without control of the terminal."""
    return _shortened(text if text.isprintable() else repr(text)[1:-1])


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_plain(value: object) -> bool:
    return not isinstance(value, dict)


UNITS = {"s": "seconds", "mib": "MiB", "gib": "GiB", "tokens": "tokens", "steps": "steps"}
"""The last part of a key's name → the unit of its value."""

_OTHER_UNITS = "ms us sec secs seconds min mins minutes h hours b bytes kb kib mb gb tb".split()
"""How keys are called elsewhere; taken off to find the key that is meant."""


def _unit_of(key: str) -> str:
    unit = UNITS.get(key.rpartition("_")[2])
    return f"; write a plain number of {unit}" if unit else ""


def _nearest(unknown: str) -> str:
    """A hint: the key of the same meaning in another unit, else of the same last part in another section, else the one
    that is spelt most alike."""
    keys = list(dict.fromkeys(all_keys(RunSpec)))
    unknown = re.sub(r"\.\d+(?=\.)", "", unknown)
    leaf = unknown.rpartition(".")[2]
    same_meaning = [key for key in keys if _without_unit(key) == _without_unit(unknown)]
    if same_meaning:
        unit = UNITS.get(same_meaning[0].rpartition("_")[2])
        return f"; did you mean '{same_meaning[0]}'{f', in {unit}' if unit else ''}?"
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    match = difflib.get_close_matches(unknown, same_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(
        unknown, keys, n=1, cutoff=0.75
    )
    return f"; did you mean '{match[0]}'?" if match else ""


def _unknown_kind(kind: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(kind, known, n=1)
    meant = f"did you mean '{match[0]}'?" if match else f"choose one of {', '.join(known)}"
    return f"there is no kind '{kind}' here; {meant}"


def _without_unit(key: str) -> str:
    stem, _, last = key.rpartition("_")
    return stem if last in (*UNITS, *_OTHER_UNITS) else key


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted, sections before their members."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every section in a type: itself, the variants of a union, the elements of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
