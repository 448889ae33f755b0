"""Tensors side by side in flat bytes: what every transport carries, and how its reader finds them again.

Flows in: named tensors, or flat bytes with their `Entry`s. Flows out: the other.
Invariant: a tensor begins at a multiple of `ALIGNMENT_BYTES`; views of it share the flat memory.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypedDict

import torch

ALIGNMENT_BYTES = 64

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}

NamedTensor = tuple[str, torch.Tensor]


class BucketError(RuntimeError):
    """A bucket is not, or no longer, what its reader was told, or cannot be read."""


class Entry(TypedDict):
    """Where one tensor lies; `offset` in bytes."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next tensor begins."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def packed_bytes(tensors: Sequence[NamedTensor]) -> int:
    """Bytes that `pack` needs for these tensors."""
    return sum(aligned(tensor.nbytes) for _, tensor in tensors)


def pack(flat: torch.Tensor, tensors: Sequence[NamedTensor]) -> list[Entry]:
    """Copy tensors (any strides, any device) into `flat`, uint8 of at least `packed_bytes`."""
    entries: list[Entry] = []
    offset = 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry: Entry = {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}
        view_of(flat, entry).copy_(tensor.detach())
        entries.append(entry)
        offset += aligned(tensor.nbytes)
    return entries


def views(flat: torch.Tensor, entries: Sequence[Entry]) -> Iterator[NamedTensor]:
    """The tensors in `flat`, in place."""
    for entry in entries:
        yield entry["name"], view_of(flat, entry)


def view_of(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Raises BucketError for a dtype that no bucket carries."""
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise BucketError(f"{entry['name']}: a bucket cannot carry {entry['dtype']}; known are {', '.join(_DTYPES)}")
    end = entry["offset"] + prod(entry["shape"]) * dtype.itemsize
    return flat[entry["offset"] : end].view(dtype).view(entry["shape"])
