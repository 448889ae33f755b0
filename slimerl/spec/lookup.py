"""One value of a spec by its dotted name, for scripts: `slimerl spec get training.parallel.world_size SPEC`.

Flows in: a spec, a name: of a key, or of what the spec derives from its keys. Flows out: text that a shell can use.
Invariant: a script that asks here never repeats a number of the spec.
"""

import difflib
from collections.abc import Iterator

from pydantic import BaseModel

from slimerl.spec.load import SpecError
from slimerl.spec.schema import RunSpec


def value_text(spec: RunSpec, name: str) -> str:
    """As a shell wants it: `true` and `false`, nothing for a key without a value.

    Raises:
        SpecError: the spec has no such value, or it is a whole section; names the nearest one.
    """
    found: object = spec
    for part in name.split("."):
        if not isinstance(found, BaseModel) or part not in _names(found):
            known = list(_all_names(spec))
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SpecError(f"the spec has no value '{name}'; did you mean '{nearest[0]}'?")
        found = getattr(found, part)
    if isinstance(found, BaseModel):
        raise SpecError(f"'{name}' is a section; its values are {', '.join(sorted(_names(found)))}")
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, tuple):
        return " ".join(map(str, found))
    return "" if found is None else str(found)


def _names(section: BaseModel) -> set[str]:
    """Keys, and the properties that this package derives from them."""
    kinds = [kind for kind in type(section).__mro__ if kind.__module__.startswith("slimerl.")]
    derived = {name for kind in kinds for name, value in vars(kind).items() if isinstance(value, property)}
    return {name for name in (*type(section).model_fields, *derived) if not name.startswith("_")}


def _all_names(section: BaseModel, prefix: str = "") -> Iterator[str]:
    for name in sorted(_names(section)):
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _all_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name
