"""Packs of sequences that may share a beginning: which token stands at which position, and what it sees.

Flows in: the segments of a pack. Flows out: a `SegmentedPack`, Megatron's description of packed sequences for this
package's own attention. Invariant: a token sees the tokens of its segment up to itself, and all tokens of the
segments that it continues; its position is the number of tokens that it sees besides itself.

Under context parallelism token i of the pack is computed by rank i mod context: each rank has an equal part of every
sequence's cheap beginning and expensive end, whatever the lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

MAX_PADDED_SHARE = 0.2
"""Share of one padded block that may be padding. Attention is a small part of a step with short sequences;
an own call for each of hundreds of sequences costs more than this padding."""


_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a pack; they continue segment `parent`, or begin a sequence."""

    start: int
    length: int
    parent: int | None = None


@dataclass(frozen=True)
class Stripes:
    """How the tokens of a pack are spread over context-parallel ranks."""

    rank: int = 0
    size: int = 1

    def own(self, tokens: int) -> np.ndarray:
        """The tokens of the pack that this rank computes, in order."""
        return np.arange(self.rank, tokens, self.size)

    def local(self, tokens: np.ndarray) -> np.ndarray:
        """Where the rank that computes a token keeps it."""
        return tokens // self.size

    def gathered(self, tokens: np.ndarray, total: int) -> np.ndarray:
        """Where a token stands when the ranks' parts stand one after the other."""
        return (tokens % self.size) * (total // self.size) + tokens // self.size


UNSPREAD = Stripes()


@dataclass(frozen=True)
class AttentionBlock:
    """Some pieces of sequences as one padded batch.

    Args:
        queries: [pieces, width], tokens of this rank; padding repeats a token.
        keys: [pieces, key width], tokens of the gathered pack; padding repeats a token and is never seen.
        last: [pieces, width], the last key that each query sees; None: query i sees keys 0 to i.
        real: the places of `queries`, flattened, that are no padding.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    last: torch.Tensor | None
    real: torch.Tensor

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token at each real place."""
        return self.queries.flatten()[self.real]

    @cached_property
    def hidden(self) -> torch.Tensor | None:
        """[pieces, 1, width, key width] bool, True where a query does not see a key; None: plain causal."""
        if self.last is None:
            return None
        keys = torch.arange(self.keys.shape[1], device=self.keys.device)
        return (keys > self.last[..., None])[:, None]


@dataclass
class SegmentedPack(PackedSeqParams):
    """`positions` [tokens of this rank]: the rotary position of each.

    The format is none of Megatron's: its modules then leave the tokens as they are, [tokens, 1, …], and take rotary
    frequencies for each token.
    """

    qkv_format: str = "segments"
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    longest: int = 0
    """Tokens of the longest sequence."""
    blocks: Sequence[AttentionBlock] = ()
    owner: np.ndarray = field(default_factory=lambda: _NOTHING)
    """[tokens of the pack], the segment of each."""
    parents: Sequence[int | None] = ()
    """Of each segment."""
    stripes: Stripes = UNSPREAD
    mask: Any = None
    """What an attention kernel has made of this pack, kept for the next layer."""


@dataclass(frozen=True)
class Laid:
    """A pack as it is computed, padding included.

    Args:
        total: tokens of the pack.
        where: [real tokens], where each stands among all.
        own: the tokens that this rank computes, in its order.
        packed: what attention and rotary embedding are told.
    """

    total: int
    where: np.ndarray
    own: np.ndarray
    packed: PackedSeqParams


def lay_segments(
    segments: Sequence[Segment], multiple: int, stripes: Stripes = UNSPREAD, device: torch.device | str = "cpu"
) -> Laid:
    """Lay out `segments`, which cover the pack without gap; a parent stands before its children.

    Args:
        multiple: each rank's part must be a multiple of it. What is missing is padded by a sequence of its own.
    """
    real = sum(segment.length for segment in segments)
    rest = -real % (multiple * stripes.size)
    if rest or not real:
        segments = [*segments, Segment(real, rest or multiple * stripes.size)]
    total = sum(segment.length for segment in segments)
    return Laid(total, np.arange(real), stripes.own(total), _segmented(segments, total, stripes, device))


def _segmented(segments: Sequence[Segment], total: int, stripes: Stripes, device: torch.device | str) -> SegmentedPack:
    positions = np.zeros(total, dtype=np.int64)
    seen: list[np.ndarray] = []
    pieces: list[_Piece] = []
    for segment in segments:
        before = seen[segment.parent] if segment.parent is not None else _NOTHING
        own = np.arange(segment.start, segment.start + segment.length)
        positions[own] = len(before) + np.arange(segment.length)
        seen.append(np.concatenate([before, own]))
        queries = own[own % stripes.size == stripes.rank]
        if len(queries):
            pieces.append(_Piece(queries, seen[-1], positions[queries]))
    # on a GPU the attention kernel takes the mask instead
    groups = [] if torch.device(device).type == "cuda" else padded_groups(pieces)
    blocks = [_block([pieces[i] for i in group], stripes, total, device) for group in groups]
    return SegmentedPack(
        positions=torch.from_numpy(positions[stripes.own(total)]).to(device),
        longest=max(map(len, seen)),
        blocks=blocks,
        owner=np.repeat(np.arange(len(segments)), [segment.length for segment in segments]),
        parents=[segment.parent for segment in segments],
        stripes=stripes,
    )


@dataclass(frozen=True)
class _Piece:
    """Queries of one segment, what its last token sees, and the last of these that each query sees."""

    queries: np.ndarray
    keys: np.ndarray
    last: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.queries), len(self.keys)

    @property
    def is_plain(self) -> bool:
        return len(self.queries) == len(self.keys)


def padded_groups(pieces: Sequence[_Piece]) -> list[list[int]]:
    """Group pieces of similar size, so that no group is padded by more than MAX_PADDED_SHARE.

    Plain pieces and others do not mix: plain ones need no mask.

    Returns:
        Indices into `pieces`; each stands in exactly one group.
    """
    groups: list[list[int]] = []
    width, keys, real = 0, 0, 0
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i].is_plain, *pieces[i].shape), reverse=True)
    for index in order:
        here = pieces[index].shape
        width, keys, real = max(width, here[0]), max(keys, here[1]), real + here[0] * here[1]
        padded = width * keys * (len(groups[-1]) + 1) if groups else 0
        fits = groups and padded - real <= MAX_PADDED_SHARE * padded
        if not fits or pieces[groups[-1][0]].is_plain != pieces[index].is_plain:
            groups.append([])
            (width, keys), real = here, here[0] * here[1]
        groups[-1].append(index)
    return groups


def _block(pieces: Sequence[_Piece], stripes: Stripes, total: int, device: torch.device | str) -> AttentionBlock:
    widths = np.array([len(piece.queries) for piece in pieces])
    real = np.flatnonzero((np.arange(widths.max()) < widths[:, None]).ravel())
    last = _padded([piece.last for piece in pieces])
    return AttentionBlock(
        queries=_on(stripes.local(_padded([piece.queries for piece in pieces])), device),
        keys=_on(stripes.gathered(_padded([piece.keys for piece in pieces]), total), device),
        last=None if all(piece.is_plain for piece in pieces) else _on(last, device),
        real=_on(real, device),
    )


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of one length: short ones repeat their first entry."""
    width = max(map(len, rows))
    return np.stack([np.concatenate([row, np.full(width - len(row), row[0])]) for row in rows])


def _on(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
