"""The options that the installed SGLang knows, read from its source: importing it takes seconds, and a GPU's libraries.

Flows in: the package's files. Flows out: names of options, as `--name`.
Invariant: what cannot be read is no statement: of a package that is not there, or declares its options in a way that is
not known here, no option is said to be unknown.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_OPTIONS = ("srt/server_args.py", "srt/arg_groups/fields/*.py")
"""Where a server's options are declared: by calls of `add_argument`, or as annotated fields of classes."""
_ANNOTATED = frozenset({"A", "Annotated"})
_SURELY = frozenset({"--model-path", "--tp-size", "--context-length"})
"""Where these are missing, too, the declarations were not understood."""


@cache
def known_options(package: Path | None = None) -> frozenset[str]:
    """Empty where they cannot be told. `package`: directory of SGLang's; default: the installed one's."""
    if package is None:
        found = importlib.util.find_spec("sglang")
        if found is None or not found.submodule_search_locations:
            return frozenset()
        package = Path(found.submodule_search_locations[0])
    names: set[str] = set()
    for pattern in _OPTIONS:
        for file in package.glob(pattern):
            try:
                names.update(_declared(ast.parse(file.read_text(encoding="utf-8"))))
            except (OSError, SyntaxError, ValueError):
                return frozenset()
    return frozenset(names) if names >= _SURELY else frozenset()


def unknown_options(arguments: Sequence[str], known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(an option that is none of `known`, the one that was perhaps meant). As argparse, the beginning of a name stands
    for the name."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if known and name.startswith("--") and not any(each.startswith(name) for each in known):
            yield name, difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]


def _declared(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield from _texts(node.args)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield from _of_field(node.target.id, node.annotation)


def _of_field(name: str, annotation: ast.expr) -> Iterator[str]:
    """Of `name: A[type, "help"]` or `name: A[type, Arg(...)]`."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name)):
        return
    if annotation.value.id not in _ANNOTATED or not isinstance(annotation.slice, ast.Tuple):
        return
    option, negated = "--" + name.replace("_", "-"), False
    for part in annotation.slice.elts[1:]:
        for keyword in part.keywords if isinstance(part, ast.Call) else ():
            if keyword.arg == "no_cli" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                return
            if keyword.arg == "cli_name":
                option = next(_texts([keyword.value]), option)
            elif keyword.arg == "aliases" and isinstance(keyword.value, ast.List):
                yield from _texts(keyword.value.elts)
            elif keyword.arg == "action":
                negated = ast.unparse(keyword.value).endswith("BooleanOptionalAction")
    yield option
    if negated:
        yield "--no-" + option.removeprefix("--")


def _texts(nodes: Sequence[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield node.value
