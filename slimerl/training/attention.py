"""Core attention by torch's scaled_dot_product_attention, over packs whose sequences may share a beginning.

Flows in: query, key, value of a pack, [tokens, heads, dim] or [tokens, 1, heads, dim]; its blocks. Flows out:
[tokens, 1, heads·dim]. Many short pieces are computed as few padded batches (`segments.padded_groups`). Padding of
keys is never seen; the output of padded queries is never read. On a GPU the pack is one FlexAttention call.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from slimerl.training.flex_attention import NO_PARENT, masked_attention, pack_mask
from slimerl.training.segments import AttentionBlock, SegmentedPack, Stripes

MAX_PLAIN_WIDTH = 512
"""torch's CPU kernel is slow in bfloat16: its forward and backward pass over 64 sequences of 60 tokens takes 78 ms,
two batched products and a softmax 18 ms; with more than 512 tokens the kernel is faster, and needs less memory."""


class SdpaAttention(MegatronModule):
    """Grouped-query, causal, packed, with context parallelism and head sizes of latent attention; Megatron's local
    DotProductAttention offers none of the last three.

    Under context parallelism keys and values are gathered, and the gradients of both are reduced and scattered back.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self._spread = config.context_parallel_size > 1
        self._context = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: SegmentedPack | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:  # [positions, batch, heads, dim]
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._causal(query, key, value, None)
            return out.permute(2, 0, 1, 3).flatten(2)
        query, key, value = (x.flatten(0, -3) for x in (query, key, value))
        if self._spread:
            group = self._context or parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(x, True, group=group) for x in (key, value))
        if query.is_cuda:
            return masked_attention(query, key, value, _mask(packed_seq_params), self.scale).flatten(1)[:, None]
        blocks = packed_seq_params.blocks
        parts = [self._block(block, query, key, value) for block in blocks]
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        out = out.index_copy(0, torch.cat([block.tokens for block in blocks]), torch.cat(parts))
        return out.flatten(1)[:, None]

    def _block(
        self, block: AttentionBlock, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The attention of one block: [its real tokens, heads, dim]."""
        keys = block.keys.flatten()
        out = self._causal(
            query.index_select(0, block.queries.flatten()).unflatten(0, block.queries.shape).transpose(1, 2),
            key.index_select(0, keys).unflatten(0, block.keys.shape).transpose(1, 2),
            value.index_select(0, keys).unflatten(0, block.keys.shape).transpose(1, 2),
            block.hidden,
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, block.real)

    def _causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """[batch, query heads, positions, dim]; keys and values [batch, key heads, key positions, dim]."""
        if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= MAX_PLAIN_WIDTH:
            return plain_attention(query, key, value, self.scale, hidden)
        grouped = query.shape[1] != key.shape[1]
        seen = None if hidden is None else ~hidden
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=hidden is None, scale=self.scale, enable_gqa=grouped
        )


def _mask(pack: SegmentedPack) -> Any:
    """The pack as FlexAttention takes it; made once, every layer asks for the same one."""
    if pack.mask is None:
        total, stripes, device = len(pack.owner), pack.stripes, pack.positions.device
        gathered = np.concatenate([Stripes(rank, stripes.size).own(total) for rank in range(stripes.size)])
        # tokens of a segment stand in order: their number in the pack grows with their position
        queries, keys, owner = (torch.from_numpy(x).to(device) for x in (stripes.own(total), gathered, pack.owner))
        parents = [NO_PARENT if parent is None else parent for parent in pack.parents]
        pack.mask = pack_mask(owner[queries], queries, owner[keys], keys, torch.tensor(parents, device=device))
    return pack.mask


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped-query attention as two batched products and a softmax; arguments as `SdpaAttention._causal`."""
    batch, heads, width, dim = query.shape
    groups, keys = key.shape[1:3]
    # the query heads of a group stand below each other, so that each group is one product
    rows = query.reshape(batch * groups, heads // groups * width, dim)
    key, value = (x.reshape(batch * groups, keys, x.shape[-1]) for x in (key, value))
    if hidden is None:
        hidden = torch.ones(width, keys, dtype=torch.bool, device=query.device).triu(1)[None, None]
    unseen = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    scores = torch.bmm(rows, key.transpose(1, 2) * (dim**-0.5 if scale is None else scale))
    scores = scores.view(batch, heads, width, keys).add_(unseen)
    shares = scores.softmax(-1).view(batch * groups, heads // groups * width, keys)
    return torch.bmm(shares, value).view(batch, heads, width, value.shape[-1])
