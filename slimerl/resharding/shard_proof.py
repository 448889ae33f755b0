"""The proof of a sync in which no rank has a whole tensor: each sender hashes what it sends, and the sums are compared.

Flows in: a sender's parcels, the engine ranks' placements. Flows out: for each engine rank and tensor the digest that
its live parameters must have. Invariant: each element that an engine rank holds is hashed once for it, by the rank that
sends it, as the bytes that cross the wire.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slimerl.engine.inside.digest import digest
from slimerl.engine.inside.parcels import Contents, Segment, typed
from slimerl.resharding.boxes import Box
from slimerl.resharding.coverage import CoverageError, some_names
from slimerl.resharding.families import BlockScales
from slimerl.resharding.proof import compare_digests, digest_granules
from slimerl.resharding.shard_quantise import scale_placements
from slimerl.resharding.tensors import LogicalTensor, Placement

_MODULUS = 1 << 64
Holders = dict[str, dict[Box, list[int]]]


def holders_of(engine_ranks: Sequence[Sequence[Placement]]) -> Holders:
    """Which ranks of an engine hold which boxes of each tensor."""
    found: Holders = defaultdict(dict)
    for rank, placements in enumerate(engine_ranks):
        for placement in placements:
            if not placement.is_padding:
                found[placement.tensor].setdefault(placement.box, []).append(rank)
    return dict(found)


def shard_granules(
    tensors: Mapping[str, LogicalTensor],
    engine_ranks: Sequence[Sequence[Placement]],
    trainer_ranks: Sequence[Sequence[Placement]],
    scales: BlockScales | None,
) -> dict[str, int]:
    """`digest_granules`, which respect what both sides cut: the trainer's ranks also cut the scales that they make."""
    ranks = [*engine_ranks, *trainer_ranks]
    if scales is not None:
        ranks += [scale_placements(placements, tensors, scales) for placements in trainer_ranks]
    return digest_granules(list(tensors.values()), ranks)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor inside a segment: its rows and columns there, and the engine ranks that hold it."""

    tensor: str
    box: Box
    rows: slice
    columns: slice
    ranks: tuple[int, ...]


class SentDigests:
    """A sender's: `add` each parcel as it is packed; `values` are then what engines must hold of it."""

    def __init__(
        self,
        contents: Contents,
        placements: Sequence[Placement],
        tensors: Mapping[str, LogicalTensor],
        holders: Holders,
        granules: Mapping[str, int],
    ) -> None:
        """
        Args:
            contents, placements: of the sending rank.
            holders: `holders_of` the engine's ranks.

        Raises:
            CoverageError: a segment is not made of tensors that engines hold.
        """
        self._tensors, self._granules = tensors, granules
        by_parameter: dict[str, list[Placement]] = defaultdict(list)
        for placement in placements:
            if not placement.is_padding and placement.tensor in tensors:
                by_parameter[placement.parameter].append(placement)
        self.dtypes = {name: tensors[placed[0].tensor].dtype for name, placed in by_parameter.items()}
        """Of each parameter on the wire."""
        self._pieces = {
            parcel: [(segment, list(_pieces(segment, by_parameter[segment.name], holders))) for segment in segments]
            for parcel, segments in contents.segments.items()
        }
        for segment, pieces in (each for of_parcel in self._pieces.values() for each in of_parcel):
            found = sum(piece.box.numel for piece in pieces)
            if found != segment.rows * segment.columns:
                raise CoverageError(f"{segment.name}: engines hold {found} elements of what {segment} sends")
        self.values: dict[tuple[int, str], int] = {}

    def start(self) -> None:
        """A new version."""
        self.values = {}

    def add(self, parcel: int, flat: torch.Tensor) -> None:
        for segment, pieces in self._pieces[parcel]:
            sent = typed(flat, segment.offset, self.dtypes[segment.name], segment.rows, segment.columns)
            for piece in pieces:
                name, box = piece.tensor, piece.box
                part = sent[piece.rows, piece.columns].view(box.shape)
                shape = self._tensors[name].shape
                value = digest(part, name, shape, (box.starts, box.stops), self._granules[name])
                for rank in piece.ranks:
                    self.values[rank, name] = (self.values.get((rank, name), 0) + value) % _MODULUS


def _pieces(segment: Segment, placements: Iterable[Placement], holders: Holders) -> Iterable[Piece]:
    sent = Box((segment.row, segment.column), (segment.row + segment.rows, segment.column + segment.columns))
    for placement in placements:
        at, flat = placement.at, len(placement.at.starts) == 1
        if flat:
            at = Box((0, *at.starts), (1, *at.stops))
        common = at.intersect(sent)
        if common is None:
            continue
        inside = common.relative_to(at)
        own = placement.box
        if flat:
            found = Box((own.starts[0] + inside.starts[1],), (own.starts[0] + inside.stops[1],))
        else:
            found = Box(*(tuple(np.add(own.starts, ends).tolist()) for ends in (inside.starts, inside.stops)))
        for box, ranks in holders.get(placement.tensor, {}).items():
            if (piece := found.intersect(box)) is None:
                continue
            moved = piece.relative_to(found)
            corner = common.relative_to(sent).starts
            starts, stops = ((0, *moved.starts), (1, *moved.stops)) if flat else (moved.starts, moved.stops)
            rows, columns = (slice(c + a, c + b) for c, a, b in zip(corner, starts, stops, strict=True))
            yield Piece(placement.tensor, piece, rows, columns, tuple(ranks))


class ShardProof:
    """What every rank of every engine must hold, from the senders' reports."""

    def __init__(self, holders: Holders, ranks: int) -> None:
        self._expected: list[dict[str, int]] = [{} for _ in range(ranks)]
        for name, boxes in holders.items():
            for rank in {rank for ranks_of_box in boxes.values() for rank in ranks_of_box}:
                self._expected[rank][name] = 0
        self._sent: set[str] = set()

    def add(self, values: Mapping[tuple[int, str], int]) -> None:
        """`SentDigests.values` of one sender."""
        for (rank, name), value in values.items():
            self._expected[rank][name] = (self._expected[rank][name] + value) % _MODULUS
            self._sent.add(name)

    def check(self, engine: str, reports: Sequence[Mapping[str, int]]) -> None:
        """As `WeightProof.check`. Raises ProofError."""
        names = {name for expected in self._expected for name in expected}
        if unsent := names - self._sent:
            raise CoverageError(f"tensors were never sent: {some_names(unsent)}")
        compare_digests(engine, self._expected, reports)
