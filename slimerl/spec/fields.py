"""Types of the specification's fields.

Invariant: strict, frozen; reals are finite, and whole numbers are accepted where reals are meant.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Strict(BaseModel):
    """Unknown keys, wrong types, infinities and NaN are errors; values cannot be reassigned."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _float_from_int(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        raise ValueError("input should be a number below 1.8e308") from None


def _path_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ValueError("a path has no NUL character; remove it")
    if not value.strip():
        raise ValueError("a path is not empty; write one, or leave the key out")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("a path is text that the file system can write; correct it") from None
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home directory for {value.partition('/')[0]}; write the whole path") from None


def tuple_from_list(value: object) -> object:
    """YAML and JSON have no tuples."""
    return tuple(value) if isinstance(value, list) else value


Real = Annotated[float, BeforeValidator(_float_from_int)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
"""What Megatron, PyTorch and SGLang count in 32 bits; more is a slip of the pen."""
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Workers = Annotated[int, Field(gt=0, le=1024)]
"""Threads or processes of one role; more than any machine has cores for is a slip of the pen."""
Seconds = Annotated[Real, Field(gt=0)]
FilePath = Annotated[Path, BeforeValidator(_path_from_text)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""NumPy, which SGLang seeds with it, takes 32 bits; the engines and Megatron's ranks add numbers of their own."""
