"""Core attention by torch's scaled_dot_product_attention, for sequences packed one after the other (THD).

Flows in: query, key, value of a pack of sequences, [tokens, heads, dim]. Flows out: [tokens, heads·dim].
Many short sequences are computed as few padded batches (`padded_groups`). Padding stands behind each sequence
and attention is causal, so that no real token sees it; its own output is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

MAX_PADDED_SHARE = 0.2
"""Share of one padded batch that may be padding. Attention is a small part of a step with short sequences;
an own call for each of hundreds of sequences costs more than this padding."""

MAX_PLAIN_WIDTH = 512
"""torch's CPU kernel is slow in bfloat16: its forward and backward pass over 64 sequences of 60 tokens takes 78 ms,
two batched products and a softmax 18 ms; with more than 512 tokens the kernel is faster, and needs less memory."""


class SdpaAttention(MegatronModule):
    """Grouped-query, causal, packed; what Megatron's local DotProductAttention does not offer."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise NotImplementedError("SdpaAttention holds whole sequences; context parallelism needs another one")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:  # [positions, batch, heads, dim]
            out = self._causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        batches = attention_batches(packed_seq_params)
        parts = [self._padded(batch, query, key, value) for batch in batches]
        out = query.new_empty(query.shape).index_copy(
            0, torch.cat([batch.tokens for batch in batches]), torch.cat(parts)
        )
        return out.flatten(1)

    def _padded(
        self, batch: "PaddedBatch", query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The attention of one padded batch: [its real tokens, heads, dim]."""
        shape = (batch.sequences, batch.width)
        padded = [x.index_select(0, batch.padded_from).unflatten(0, shape).transpose(1, 2) for x in (query, key, value)]
        return self._causal(*padded).transpose(1, 2).flatten(0, 1).index_select(0, batch.real)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[batch, query heads, positions, dim]; keys and values [batch, key heads, positions, dim]."""
        if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= MAX_PLAIN_WIDTH:
            return plain_attention(query, key, value, self.scale)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal grouped-query attention as two batched products and a softmax; arguments as `SdpaAttention._causal`."""
    batch, heads, width, dim = query.shape
    groups = key.shape[1]
    # the query heads of a group stand below each other, so that each group is one product
    rows = query.reshape(batch * groups, heads // groups * width, dim)
    key, value = (x.reshape(batch * groups, width, dim) for x in (key, value))
    future = query.new_full((width, width), float("-inf")).triu(1).repeat(heads // groups, 1)
    scores = torch.baddbmm(future[None], rows, key.transpose(1, 2), alpha=dim**-0.5 if scale is None else scale)
    return torch.bmm(scores.softmax(-1), value).view(query.shape)


@dataclass(frozen=True)
class PaddedBatch:
    """Some sequences of a pack, padded to the longest of them: [sequences, width].

    `padded_from` [sequences·width]: which token of the pack stands at each place (any, where padding stands);
    `real`: the places that are no padding; `tokens`: the tokens of the pack at these places.
    """

    sequences: int
    width: int
    padded_from: torch.Tensor
    real: torch.Tensor
    tokens: torch.Tensor


def attention_batches(packed: PackedSeqParams) -> list[PaddedBatch]:
    """The padded batches of a pack, computed once and kept with it: every layer asks for the same ones."""
    batches = getattr(packed, "sdpa_batches", None)
    if batches is None:
        bounds = packed.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        batches = [padded_batch(bounds, group, lengths) for group in padded_groups(lengths)]
        packed.sdpa_batches = batches
    return batches


def padded_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length, so that no group is padded by more than MAX_PADDED_SHARE.

    Returns:
        Indices into `lengths`; each index stands in exactly one group, the first of a group is its longest.
    """
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        real += lengths[index]
        padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded - real > MAX_PADDED_SHARE * padded:
            groups.append([])
            real = lengths[index]
        groups[-1].append(index)
    return groups


def padded_batch(bounds: torch.Tensor, group: Sequence[int], lengths: Sequence[int]) -> PaddedBatch:
    """`bounds` [sequences + 1]: where each sequence of the pack starts, and the end."""
    width = lengths[group[0]]
    starts = bounds[:-1][list(group)].long()[:, None]
    within = torch.arange(width, device=bounds.device)[None]
    is_real = within < torch.tensor([lengths[index] for index in group], device=bounds.device)[:, None]
    padded_from = torch.where(is_real, starts + within, starts).flatten()
    real = is_real.flatten().nonzero()[:, 0]
    return PaddedBatch(len(group), width, padded_from, real, padded_from[real])
