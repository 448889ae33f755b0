"""Matrix products on the CPU, by the faster of two libraries.

torch multiplies float32 matrices with MKL, which runs at half speed on CPUs that are not Intel's; oneDNN, also part
of torch, does not (measured: 95 against 210 GFLOPS on one Zen 5 core). bfloat16 goes to oneDNN by itself.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · bᵀ for matrices [m, k] and [n, k], of any strides."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and a.numel() and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = product(rows, weight.t()).unflatten(0, x.shape[:-1])
        return grad_x, product(rows.t(), x.flatten(0, -2).t())


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> torch.Tensor:
    """What Megatron's linear_with_grad_accumulation_and_async_allreduce computes, without its overlap."""
    if sequence_parallel:
        input = tensor_parallel.gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = tensor_parallel.copy_to_tensor_model_parallel_region(input, group=tp_group)
    out = _Linear.apply(input, weight)
    return out if bias is None else out + bias


class CpuColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's, multiplied by `product`."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _linear(input, weight, *args, **kwargs)


class CpuRowParallelLinear(tensor_parallel.RowParallelLinear):
    """Megatron's, multiplied by `product`."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _linear(input, weight, *args, **kwargs)
