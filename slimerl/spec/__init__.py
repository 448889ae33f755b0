"""The run specification: typed, frozen, strict YAML (`load.py`), with rules between its keys (`schema.py`)."""

from slimerl.spec.load import SpecError, load_spec
from slimerl.spec.schema import RunSpec

__all__ = ["RunSpec", "SpecError", "load_spec"]
