"""The `optimizer` of a model under training: Adam and its schedule."""

from typing import Annotated, Literal

from pydantic import Field

from slimerl.spec.fields import NonNegative, Real, Strict


class OptimizerSpec(Strict):
    lr: Annotated[Real, Field(gt=0)] = 1e-6
    min_lr: Annotated[Real, Field(ge=0)] = 0.0
    warmup_steps: NonNegative = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    beta1: Annotated[Real, Field(gt=0, lt=1)] = 0.9
    beta2: Annotated[Real, Field(gt=0, lt=1)] = 0.95
    eps: Annotated[Real, Field(gt=0)] = 1e-8
    clip_grad_norm: Annotated[Real, Field(gt=0)] = 1.0
