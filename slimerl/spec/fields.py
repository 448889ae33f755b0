"""Types of the specification's fields. Invariant: strict, frozen; whole numbers are accepted where reals are meant."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Strict(BaseModel):
    """Unknown keys and wrong types are errors; values cannot be reassigned."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _float_from_int(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Real = Annotated[float, BeforeValidator(_float_from_int)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
