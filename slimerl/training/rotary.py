"""Rotary frequencies of the positions that a pack states, instead of 0, 1, 2, …

Megatron asks its rotary module for the length of the sequence, with the pack in hand, and then for the frequencies
up to that length. `PositionedRotary` stands in place of that module and answers the first question with the pack.
"""

from typing import Any

import torch

from slimerl.training.segments import SegmentedPack


class PositionedRotary(torch.nn.Module):
    """In front of Megatron's rotary module `plain`, which still answers for other packs.

    Args:
        with_batch: the tokens stand as [tokens, 1, heads, dim], not as [tokens, heads, dim] (latent attention).
    """

    def __init__(self, plain: Any, with_batch: bool) -> None:
        super().__init__()
        self.plain = plain
        self._with_batch = with_batch

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, config: Any, packed: Any = None
    ) -> Any:
        if isinstance(packed, SegmentedPack):
            return packed
        return self.plain.get_rotary_seq_len(inference_context, transformer, transformer_input, config, packed)

    def forward(self, asked: Any, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Frequencies [tokens, 1, (1,) dim] of the pack `asked` (with Yarn's scale where `plain` gives one)."""
        if not isinstance(asked, SegmentedPack):
            return self.plain(asked, packed_seq=packed_seq, cp_group=cp_group)
        # packed: Megatron leaves the cut of packs over context-parallel ranks to later
        told = self.plain(asked.longest, packed_seq=True)
        if isinstance(told, tuple):
            return self._of(told[0], asked), *told[1:]
        return self._of(told, asked)

    def _of(self, table: torch.Tensor, pack: SegmentedPack) -> torch.Tensor:
        chosen = table.index_select(0, pack.positions)
        return chosen if self._with_batch else chosen[:, 0]
