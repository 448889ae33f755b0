"""How a parameter is made of logical tensors: each kind of cut is one small class.

Flows in: the parameter's sources and the part that a rank holds. Flows out: a `Shard`, its shape and the boxes in it.
Invariant: the pieces of a shard tile its shape, from the first row to the last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slimerl.resharding.boxes import Box
from slimerl.resharding.layouts import Layout, LayoutError, Part, divide
from slimerl.resharding.tensors import PADDING, LogicalTensor


class Piece(NamedTuple):
    """`box` of the logical tensor `tensor` lies at `at` of the shard."""

    at: Box
    tensor: str
    box: Box


class Shard(NamedTuple):
    """What one rank holds of a parameter."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Cut(Protocol):
    """A way to make a rank's shard from whole logical tensors."""

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard: ...


def _stack(boxes: Iterable[tuple[str, Box]]) -> Shard:
    """Put the boxes below each other (dimension 0)."""
    pieces: list[Piece] = []
    row = 0
    shape: tuple[int, ...] = ()
    for tensor, box in boxes:
        shape = box.shape
        at = Box.whole(shape).range_in(0, row, row + shape[0])
        pieces.append(Piece(at, tensor, box))
        row += shape[0]
    return Shard((row, *shape[1:]), tuple(pieces))


def _part_of(source: LogicalTensor, dim: int, part: Part) -> tuple[str, Box]:
    size = divide(source.shape[dim], part.of, f"{source.name} along dimension {dim}")
    return source.name, Box.whole(source.shape).range_in(dim, part.number * size, (part.number + 1) * size)


@dataclass(frozen=True)
class Even:
    """The rank's equal part of each source along `dim`, one below the other: [gate_t; up_t] and plain matrices."""

    dim: int = 0

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        return _stack(_part_of(source, self.dim, part) for source in sources)


ROWS = Even(0)
COLUMNS = Even(1)


@dataclass(frozen=True)
class GateUp:
    """SGLang's w13 of one expert: the rank's part of the gate, that of the up-projection below it, or above."""

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        ordered = reversed(sources) if layout.up_first else sources
        return _stack(_part_of(source, 0, part) for source in ordered)


@dataclass(frozen=True)
class Vocabulary:
    """Rows of one source, padded by the layout so that they come out even; the padding follows the last token."""

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        (source,) = sources
        rows = source.shape[0]
        size = divide(layout.padded_vocabulary(rows, part.of), part.of, f"padded rows of {source.name}")
        start, stop = part.number * size, (part.number + 1) * size
        whole = Box.whole(source.shape)
        boxes = []
        if start < rows:
            boxes.append((source.name, whole.range_in(0, start, min(stop, rows))))
        if stop > rows:
            boxes.append((PADDING, whole.range_in(0, 0, stop - max(start, rows))))
        return _stack(boxes)


@dataclass(frozen=True)
class QueryGroups:
    """Megatron's linear_qkv: for each group of queries its q heads, k head, v head; that tensor in equal parts of rows.

    With more ranks than groups a part is less than a group and may end inside a head.
    """

    heads: int
    groups: int

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        divide(self.heads, part.of, f"{self.heads} attention heads of {sources[0].name}")
        per_group = [divide(source.shape[0], self.groups, f"{source.name} over query groups") for source in sources]
        size = divide(self.groups * sum(per_group), part.of, f"fused rows of {sources[0].name}")
        start, stop = part.number * size, (part.number + 1) * size
        boxes, row = [], 0
        for group in range(self.groups):
            for source, rows in zip(sources, per_group, strict=True):
                first, last = max(start, row), min(stop, row + rows)
                if first < last:
                    offset = group * rows - row
                    box = Box.whole(source.shape).range_in(0, first + offset, last + offset)
                    boxes.append((source.name, box))
                row += rows
        return _stack(boxes)


@dataclass(frozen=True)
class HeadsByKind:
    """SGLang's qkv_proj: [q; k; v] of the rank's heads; with more ranks than KV heads, neighbours share a KV head."""

    heads: int
    kv_heads: int

    def shard(self, sources: Sequence[LogicalTensor], part: Part, layout: Layout) -> Shard:
        query, key, value = sources
        divide(self.heads, part.of, f"{self.heads} attention heads of {query.name}")
        kv_part = part
        if self.kv_heads < part.of:
            copies = divide(part.of, self.kv_heads, f"{part.of} ranks over the {self.kv_heads} heads of {key.name}")
            kv_part = Part(part.number // copies, self.kv_heads)
        elif self.kv_heads % part.of:
            raise LayoutError(f"{key.name}: {self.kv_heads} KV heads cannot be cut into {part.of} equal parts")
        return _stack([_part_of(query, 0, part), _part_of(key, 0, kv_part), _part_of(value, 0, kv_part)])
