"""Adam in one kernel per parameter group, whoever brings it.

Megatron takes Transformer Engine's FusedAdam where that is installed, else apex's, else torch's AdamW, which it builds
without torch's own fused kernel. Flows in: the optimizer that Megatron built. Flows out: the same, fused.
"""

from collections.abc import Iterator
from typing import Any

import torch


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's; a rank that owns no parameter of a kind has none for it."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            yield each.optimizer


def fuse_torch_adam(optimizer: Any) -> None:
    """Switch torch's Adam to its fused kernel; other optimizers are left alone. Call it before the first step: the
    kernel keeps its step count on the parameters' device."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.Adam):
            for group in inner.param_groups:
                group["fused"], group["foreach"] = True, False


def begin_state(optimizer: Any) -> None:
    """Adam's state as it is before the first update, which otherwise makes it: for a checkpoint of an optimizer that
    has made none yet."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = each.optimizer
        if inner is None:
            continue
        if not isinstance(inner, torch.optim.Adam):
            each.init_state_fn(inner)
            continue
        for parameter in (one for group in inner.param_groups for one in group["params"]):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
