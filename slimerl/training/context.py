"""Per-token results that are spread over context-parallel ranks, made whole.

Flows in: the results of this rank's tokens. Flows out: those of the whole pack, equal on every rank. Invariant: all
ranks compute the same loss from the whole, and each takes back the gradient of its own tokens alone, so that the
sum over ranks, which data parallelism makes, counts every token once.
"""

from typing import Any

import torch
import torch.distributed as dist


def whole_pack(own: torch.Tensor, places: torch.Tensor, total: int, group: Any) -> torch.Tensor:
    """[total] from [own] and where each of them stands; every place belongs to exactly one rank of `group`."""
    return _WholePack.apply(own, places, total, group)


class _WholePack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(total)
        whole[places] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None
