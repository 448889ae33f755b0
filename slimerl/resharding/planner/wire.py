"""What travels: the dtype of each weight on the wire, and the block scales of FP8.

Flows in: `quantization_config` of a config.json, or a plain dtype. Flows out: sizes, and boxes of scales.
Invariant: the bytes on the wire are the bytes that the engine stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.families.table import Weight

_NOT_QUANTISED = ("embed_tokens.", "lm_head.", ".mlp.gate.", ".eh_proj.", ".shared_head.")
"""Matrices that DeepSeek's FP8 checkpoints, and SGLang, keep in bf16."""


@dataclass(frozen=True)
class WireFormat:
    """Weights travel in `itemsize_bytes`, matrices in FP8 with one fp32 scale per block where `block` is given."""

    itemsize_bytes: int
    block: int | None = None
    """Rows and columns of a block that shares a scale; None: not quantised."""

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> "WireFormat":
        """As an engine stores the model of this config.json. Raises ValueError for a quantisation without a format."""
        quantisation = config.get("quantization_config")
        if quantisation is None:
            return cls(dtype.itemsize)
        size = quantisation.get("weight_block_size")
        if quantisation.get("quant_method") != "fp8" or not size or size[0] != size[1]:
            raise ValueError(
                f"config.json: quantization_config {dict(quantisation)!r} is not FP8 in square blocks; "
                "remove it to send the weights unquantised"
            )
        return cls(dtype.itemsize, int(size[0]))

    def is_quantised(self, weight: Weight) -> bool:
        if self.block is None or len(weight.shape) != 2 or weight.dtype is not None:
            return False
        return not any(part in weight.name for part in _NOT_QUANTISED)

    def itemsize(self, weight: Weight, scale: bool = False) -> int:
        if scale:
            return torch.float32.itemsize
        if self.is_quantised(weight):
            return torch.float8_e4m3fn.itemsize
        return self.itemsize_bytes if weight.dtype is None else weight.dtype.itemsize

    def scale_name(self, name: str) -> str:
        """SGLang's and DeepSeek's: `X.weight` has `X.weight_scale_inv`."""
        return f"{name}_scale_inv"

    def blocks(self, size: int) -> int:
        """Blocks that `size` rows or columns need."""
        assert self.block is not None
        return -(-size // self.block)

    def block_range(self, start: int, stop: int) -> tuple[int, int]:
        """The blocks that begin in a range: one that straddles two shards belongs to where it begins."""
        return self.blocks(start), self.blocks(stop)
