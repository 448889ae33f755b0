"""Core attention over packs whose sequences share prefixes, by torch's FlexAttention: the mask is a function.

Flows in: query, key, value of a pack and, for each of its tokens, which segment it belongs to and where it stands
there; of each segment, which one it continues. Flows out: [query tokens, heads, value dim].
Invariant: a token sees the tokens of its own segment up to itself, all tokens of the segments that its own one
continues (its ancestors), and nothing else.

Example: a prompt of 3 tokens shared by two responses is three segments; `parent_of_segment = [-1, 0, 0]`,
`segment = [0, 0, 0, 1, 1, 2, 2]`, `position = [0, 1, 2, 0, 1, 0, 1]` (any numbering that grows inside a segment).

On a GPU the kernel is compiled, and blocks of 128 x 128 tokens in which nothing is seen cost nothing. On the CPU torch
applies the same mask to plain scores, without a backward pass: there it serves to check the mask.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

NO_PARENT = -1


def flex_attention_over_pack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment_of_query: torch.Tensor,
    position_of_query: torch.Tensor,
    segment_of_key: torch.Tensor,
    position_of_key: torch.Tensor,
    parent_of_segment: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of one pack.

    Args:
        query: [query tokens, heads, dim]; key: [key tokens, key heads, dim]; value: [key tokens, key heads, value
            dim]. Key heads divide heads (grouped-query attention).
        segment_of_query, position_of_query: [query tokens], integers; likewise `_of_key`.
        parent_of_segment: [segments]: the segment that it continues, or NO_PARENT.
        scale: of the scores; default: 1 / sqrt(dim).

    Returns:
        [query tokens, heads, value dim]. A query token that sees no key gets zeros.

    Raises:
        ValueError: a segment is its own ancestor, or a token's segment does not exist.
    """
    mask = pack_mask(segment_of_query, position_of_query, segment_of_key, position_of_key, parent_of_segment)
    return masked_attention(query, key, value, mask, scale)


def pack_mask(
    segment_of_query: torch.Tensor,
    position_of_query: torch.Tensor,
    segment_of_key: torch.Tensor,
    position_of_key: torch.Tensor,
    parent_of_segment: torch.Tensor,
) -> BlockMask:
    """The block mask of a pack; make it once and use it in every layer. Arguments as `flex_attention_over_pack`."""
    visible = ancestors(parent_of_segment)
    _check_segments(segment_of_query, len(visible), "query")
    _check_segments(segment_of_key, len(visible), "key")

    # the compiler wants a closure over tensors here; an object with __call__ it does not take
    def sees(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own, other = segment_of_query[query], segment_of_key[key]
        before = position_of_key[key] <= position_of_query[query]
        return ((own == other) & before) | visible[own, other]

    # uncompiled, it would hold [query tokens, key tokens] in memory
    make: Callable[..., BlockMask] = _compiled(create_block_mask) if visible.is_cuda else create_block_mask
    return make(sees, None, None, len(segment_of_query), len(segment_of_key), device=visible.device)


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float | None = None
) -> torch.Tensor:
    """Attention under a pack's mask; shapes as `flex_attention_over_pack`."""
    attend: Any = _compiled(flex_attention) if query.is_cuda else flex_attention
    batched = [x.transpose(0, 1)[None] for x in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    out = attend(*batched, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def ancestors(parent_of_segment: torch.Tensor) -> torch.Tensor:
    """[segments, segments], bool: row s marks the segments that s continues, itself left out.

    Raises:
        ValueError: a parent does not exist, or a segment is its own ancestor.
    """
    parents = parent_of_segment.tolist()
    found = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for segment in range(len(parents)):
        above = parents[segment]
        while above != NO_PARENT:
            if not 0 <= above < len(parents):
                raise ValueError(f"segment {segment} continues segment {above}, but there are {len(parents)}")
            if above == segment or found[segment, above]:
                raise ValueError(f"segment {segment} is its own ancestor: parent_of_segment = {parents}")
            found[segment, above] = True
            above = parents[above]
    return found.to(parent_of_segment.device)


def _check_segments(segment: torch.Tensor, count: int, what: str) -> None:
    if len(segment) and not 0 <= int(segment.min()) <= int(segment.max()) < count:
        raise ValueError(
            f"{what} tokens name segments {int(segment.min())} to {int(segment.max())}, "
            f"but parent_of_segment describes {count}"
        )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all lengths: packs differ from step to step, and a compilation takes seconds."""
    return torch.compile(function, dynamic=True)
