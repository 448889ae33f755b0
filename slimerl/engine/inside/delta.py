"""What changed between two states of a tensor, in few bytes: the codec of `sync.transport: delta`.

Flows in: two states as raw elements of any dtype. Flows out: bytes, from which the second is made of the first.
Invariant: exact for every bit pattern (NaN payloads, negative zero): elements are only ever read as unsigned integers
and a *step* is their difference modulo 2^bits.

What an optimizer step does to bf16 weights: few elements move, most of them to the next number above or below. So the
places cost most, and are written as gaps; of a step to a neighbour only its sign remains. Layout of the bytes::

    header | gaps | high bytes of long gaps, by plane | signs | magnitudes - 1, by plane

A gap is the number of unchanged elements before a changed one, in one byte; from 255 on the rest stands in planes of
its own. Signs are bits; each other part is a frame of zstd, whose Huffman coding comes within a hundredth of the
entropy of random gaps. A plane is the n-th byte of each number; planes that are all zero are left out: with steps to
neighbours alone there are none of magnitudes.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard

_LONG = 255
"""In place of a gap: it is at least this long, and the rest stands elsewhere."""
_HEADER = struct.Struct("<QBB")
"""Changed elements, planes of long gaps, planes of magnitudes; the frames' lengths follow."""
_LENGTH = struct.Struct("<Q")
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 14
"""Both states of a chunk stay in the L2 cache of a core, with all that is made of them."""
_ZSTD_LEVEL = 1
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = np.ndarray[Any, Any]


class DeltaError(ValueError):
    """Bytes are no delta of a tensor of this shape and dtype."""


@dataclass(frozen=True)
class Changes:
    """Which elements of a flat tensor differ, and by how much."""

    positions: Array
    """Ascending, int64 [changed]."""
    steps: Array
    """New element minus old one, modulo 2^bits; unsigned [changed], as wide as an element. None is zero."""

    def __len__(self) -> int:
        return len(self.positions)


def units(tensor: torch.Tensor) -> Array:
    """The elements of a tensor on the CPU as unsigned integers, flat; in place where it is contiguous."""
    flat = np.ascontiguousarray(integers_of(tensor.detach()).reshape(-1).numpy())
    return flat.view(f"u{tensor.element_size()}")


def find_changes(old: Array, new: Array) -> Changes:
    """Compare two states as `units`. Eight bytes at once: where little changes, most words need no second look."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise DeltaError(f"{new.dtype} {new.shape} cannot be compared with {old.dtype} {old.shape}")
    per_word = _WORD_BYTES // old.itemsize
    whole = len(old) // per_word * per_word
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    found: list[tuple[Array, Array]] = []
    for start in range(0, len(old_words), _CHUNK_WORDS):
        before, after = old_words[start : start + _CHUNK_WORDS], new_words[start : start + _CHUNK_WORDS]
        words = np.flatnonzero(before != after)
        if len(words):
            steps = after[words].view(new.dtype) - before[words].view(old.dtype)
            at = np.flatnonzero(steps)
            found.append(((words[at // per_word] + start) * per_word + at % per_word, steps[at]))
    rest = new[whole:] - old[whole:]
    at = np.flatnonzero(rest)
    found.append((at + whole, rest[at]))
    return Changes(np.concatenate([place for place, _ in found]), np.concatenate([step for _, step in found]))


def encode(changes: Changes) -> bytes:
    """The changes as bytes, for `decode`."""
    gaps = np.diff(changes.positions, prepend=-1) - 1
    short = np.minimum(gaps, _LONG).astype(np.uint8)
    long = (gaps[short == _LONG] - _LONG).astype(np.uint64)
    bits = 8 * changes.steps.itemsize
    negative = (changes.steps >> (bits - 1)).astype(bool)
    magnitudes = np.where(negative, -changes.steps, changes.steps) - changes.steps.dtype.type(1)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    of_gaps, of_magnitudes = _planes(long), _planes(magnitudes)
    frames = [
        *(compressor.compress(plane.data) for plane in (short, *of_gaps)),
        np.packbits(negative).tobytes(),
        *(compressor.compress(plane.data) for plane in of_magnitudes),
    ]
    header = _HEADER.pack(len(changes), len(of_gaps), len(of_magnitudes))
    return b"".join((header, *(_LENGTH.pack(len(frame)) for frame in frames), *frames))


def decode(data: bytes | memoryview, itemsize: int, numel: int) -> Changes:
    """What `encode` was given.

    Args:
        itemsize, numel: of the tensor.

    Raises:
        DeltaError: they are not the bytes of a delta of such a tensor.
    """
    try:
        return _decode(memoryview(data), itemsize, numel)
    except (struct.error, zstandard.ZstdError, ValueError) as error:
        raise DeltaError(f"no delta of {numel} elements of {itemsize} bytes: {error}") from None


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, in place; any strides, any device. (A copy of other dtypes may touch bits.)"""
    return tensor.view(_INTEGER_OF[tensor.element_size()])


def apply(changes: Changes, target: torch.Tensor) -> None:
    """Add the steps to `target`, in place: any strides, any device, any dtype.

    `changes` count its elements in row-major order.
    """
    integers = integers_of(target)
    where = torch.from_numpy(changes.positions).to(target.device)
    steps = torch.from_numpy(changes.steps.view(changes.steps.dtype.str.replace("u", "i")))
    steps = steps.view(integers.dtype).to(target.device)
    index: tuple[torch.Tensor, ...]
    if target.is_contiguous():
        integers, index = integers.view(-1), (where,)
    else:
        index = torch.unravel_index(where, target.shape)
    integers[index] = integers[index] + steps


def _planes(numbers: Array) -> list[Array]:
    """The bytes of little-endian unsigned numbers: all first ones, all second ones, … up to the last that is not
    always zero."""
    used = -(-int(numbers.max()).bit_length() // 8) if len(numbers) else 0
    table = numbers.astype(numbers.dtype.newbyteorder("<")).view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return [np.ascontiguousarray(table[:, plane]) for plane in range(used)]


def _decode(data: memoryview, itemsize: int, numel: int) -> Changes:
    count, of_gaps, of_magnitudes = _HEADER.unpack_from(data)
    if count > numel or of_gaps > _WORD_BYTES or of_magnitudes > itemsize:
        raise ValueError(f"{count} changed elements, {of_gaps} and {of_magnitudes} planes")
    frames = _frames(data, 1 + of_gaps + 1 + of_magnitudes)
    gaps = _numbers(frames[:1], count, 8)
    at_long = np.flatnonzero(gaps == _LONG)
    gaps[at_long] += _numbers(frames[1 : 1 + of_gaps], len(at_long), 8)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and (int(positions[-1]) >= numel or int(positions.min()) < 0):
        raise ValueError("a position lies outside")
    signs = np.frombuffer(frames[1 + of_gaps], np.uint8)
    if len(signs) != -(-count // 8):
        raise ValueError(f"{len(signs)} bytes of signs for {count} changed elements")
    negative = np.unpackbits(signs, count=count).astype(bool)
    steps = _numbers(frames[2 + of_gaps :], count, itemsize)
    steps += steps.dtype.type(1)
    return Changes(positions, np.where(negative, -steps, steps))


def _frames(data: memoryview, count: int) -> list[memoryview]:
    start = _HEADER.size + count * _LENGTH.size
    frames = []
    for (length,) in _LENGTH.iter_unpack(data[_HEADER.size : start]):
        frames.append(data[start : start + length])
        start += length
    if len(frames) != count or start != len(data):
        raise ValueError(f"{len(data)} bytes, where the header says {start}")
    return frames


def _numbers(planes: Sequence[memoryview], count: int, itemsize: int) -> Array:
    """The inverse of `_planes`, of compressed ones."""
    table = np.zeros((count, itemsize), np.uint8)
    for number, frame in enumerate(planes):
        plane = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count)
        if len(plane) != count:
            raise ValueError(f"a plane has {len(plane)} bytes for {count} elements")
        table[:, number] = np.frombuffer(plane, np.uint8)
    return table.view(f"<u{itemsize}").reshape(count)
