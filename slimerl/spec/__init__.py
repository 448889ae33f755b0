"""The run specification: typed, frozen, strict YAML (`schema.py`, `load.py`) and the checks before a run."""

from slimerl.spec.load import SpecError, load_spec
from slimerl.spec.schema import RunSpec

__all__ = ["RunSpec", "SpecError", "load_spec"]
