"""Products with weights on a machine without CUDA: of a row the same whatever rows stand beside it, and faster.

MKL, by which torch multiplies float32 matrices, sums in another order for one, two and three rows; oneDNN, also part of
torch, for one. What a request gets would then depend on how many others run at that moment, in the last bit, and with
that now and then the token that is drawn. bfloat16 goes to oneDNN by itself, and is invariant already.
Invariant: a row of the result is a function of that row and the weights, to the last bit.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from slimerl.engine.inside.import_hooks import after_import

LEAST_ROWS = 4
"""From so many rows on both libraries sum a row in one order; fewer are filled up."""

LARGE = 1 << 16
"""Weights of so many elements are multiplied by oneDNN, at up to twice MKL's speed on CPUs that are not Intel's; with
smaller ones its fixed cost of each call weighs more. By the weights alone: which library it is must not depend on the
rows."""

_stock_linear = F.linear


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`; see the module docstring."""
    if not _is_plain(input, weight):
        return _stock_linear(input, weight, bias)
    rows = input.flatten(0, -2)
    if missing := max(0, LEAST_ROWS - len(rows)):
        rows = F.pad(rows, (0, 0, 0, missing))
    if weight.numel() < LARGE or not torch.backends.mkldnn.is_available():
        out = _stock_linear(rows, weight)
    else:
        out = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    out = out[: len(out) - missing].unflatten(0, input.shape[:-1])
    return out if bias is None else out + bias


def _is_plain(input: torch.Tensor, weight: torch.Tensor) -> bool:
    float32 = input.dtype == weight.dtype == torch.float32
    return float32 and input.device.type == "cpu" and input.ndim > 1 and input.numel() > 0 and weight.ndim == 2


def install_invariant_linear() -> None:
    """For all of this process, and for SGLang's output layer, which multiplies on its own."""
    F.linear = linear
    after_import("sglang.srt.layers.logits_processor", _output_layer_by_its_method)


def _output_layer_by_its_method(module: ModuleType) -> None:
    stock = module.should_apply_lm_head_quant_method

    def should_apply(lm_head: Any, quant_method: Any) -> bool:
        weight = getattr(lm_head, "weight", None)
        plain = weight is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"
        return (plain and hasattr(quant_method, "apply")) or stock(lm_head, quant_method)

    module.should_apply_lm_head_quant_method = should_apply  # type: ignore[attr-defined]
