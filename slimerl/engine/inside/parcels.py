"""Parcels: the bytes of many boxes of parameters, one after another, as they cross a link.

Flows in: segments (where a box lies in its parameter and in its parcel), parameters. Flows out: packed bytes, or
written parameters. Invariants: a segment's rows follow each other in the parcel without a gap; what is read and what
is written is the same table on both sides, so that nothing of a parcel is interpreted on the way.
"""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from slimerl.engine.inside.digest import digest

NO_SLICE = -1
SLOT_BYTES = 64
"""Parcels lie at multiples of this in a staging buffer."""
_WORD = 8
_ROW_WORDS = 1024
"""A parcel's checksum is that of a matrix with rows of so many words, and of what is left over."""


class Segment(NamedTuple):
    """Rows `row` to `row + rows` and columns `column` to `column + columns` of a parameter (of its slice `slice_`,
    where it is stacked), at byte `offset` of its parcel."""

    offset: int
    name: str
    slice_: int
    row: int
    rows: int
    column: int
    columns: int


def encode(values: torch.Tensor) -> str:
    """int64, any shape, as text; `decode` gives it back flat."""
    return base64.b64encode(values.to(torch.int64).contiguous().numpy().tobytes()).decode()


def decode(text: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    return torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Contents:
    """What a member packs into, or stores of, each parcel that concerns it."""

    nbytes: dict[int, int]
    """By parcel."""
    segments: dict[int, list[Segment]]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Contents":
        """`message`: `parcels` [n, 2] (parcel, bytes), `segments` [n, 8] (parcel, then as `Segment`, its name by its
        number in `names`), both `encode`d."""
        names: Sequence[str] = message["names"]
        segments: dict[int, list[Segment]] = defaultdict(list)
        for parcel, offset, name, *box in decode(message["segments"]).view(-1, 8).tolist():
            segments[parcel].append(Segment(offset, names[name], *box))
        return cls(dict(decode(message["parcels"]).view(-1, 2).tolist()), dict(segments))

    def slots(self) -> tuple[dict[int, int], int]:
        """Where each parcel begins in a buffer of all of them, and the size of that."""
        begins, size = {}, 0
        for parcel, nbytes in self.nbytes.items():
            begins[parcel] = size
            size += -(-nbytes // SLOT_BYTES) * SLOT_BYTES
        return begins, size


def box_of(parameter: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[rows, columns] of the live parameter."""
    inside = parameter if segment.slice_ == NO_SLICE else parameter[segment.slice_]
    if inside.dim() < 2:
        inside = inside.view(1, -1)
    rows, columns = (
        slice(segment.row, segment.row + segment.rows),
        slice(segment.column, segment.column + segment.columns),
    )
    return inside[rows, columns]


def write(flat: torch.Tensor, segments: Sequence[Segment], parameters: Mapping[str, torch.Tensor]) -> int:
    """From a parcel into parameters, whose dtypes are those of the wire; returns the bytes written."""
    written = 0
    with torch.no_grad():
        for segment in segments:
            target = box_of(parameters[segment.name], segment)
            target.copy_(typed(flat, segment.offset, target.dtype, segment.rows, segment.columns))
            written += target.numel() * target.element_size()
    return written


def pack(
    flat: torch.Tensor,
    segments: Sequence[Segment],
    parameters: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Into a parcel, in the dtypes of the wire."""
    with torch.no_grad():
        for segment in segments:
            source, dtype = box_of(parameters[segment.name], segment), dtypes[segment.name]
            if segment.offset % dtype.itemsize == 0:
                typed(flat, segment.offset, dtype, segment.rows, segment.columns).copy_(source)
            else:
                data = source.to(dtype).contiguous().view(torch.uint8).view(-1)
                flat[segment.offset : segment.offset + data.numel()].copy_(data)


def typed(flat: torch.Tensor, offset: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] of a parcel: a view, unless the bytes lie where no such element may (then a copy)."""
    data = flat[offset : offset + rows * columns * dtype.itemsize]
    if (flat.storage_offset() + offset) % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(rows, columns)


def checksum(flat: torch.Tensor) -> int:
    """Of a parcel's bytes and their places, as a signed 64-bit number."""
    words = flat.numel() // _WORD
    rows, whole = words // _ROW_WORDS, words // _ROW_WORDS * _ROW_WORDS
    matrix = typed(flat, 0, torch.int64, rows, _ROW_WORDS)
    rest = flat[whole * _WORD :]
    tail = torch.zeros(-(-rest.numel() // _WORD) * _WORD, dtype=torch.uint8, device=flat.device)
    tail[: rest.numel()] = rest
    last = tail.view(torch.int64)
    total = digest(matrix, "rows", (rows, _ROW_WORDS), ((0, 0), (rows, _ROW_WORDS)), _WORD) if rows else 0
    total += digest(last, "rest", (len(last),), ((0,), (len(last),)), _WORD) if len(last) else 0
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total
