"""A positional 64-bit digest of weights that adds up over any sharding.

Flows in: a view of some elements of a tensor, and where they lie in the whole of it. Flows out: an integer.
Invariant: the digests of the boxes of a partition add up (mod 2^64) to the digest of the whole, so that trainer and
engine can be compared whatever either has cut. This module needs torch alone; it runs inside the engine.

    digest(box) = key(name) * sum over the words w of the box: mix(w) * a(row) * b(column)    (mod 2^64)

- A word is `granule` bytes (see `granule`); row and column count words in the whole tensor, with all dimensions but
  the last flattened into the row.
- a and b are fixed streams of odd numbers (splitmix64, Steele et al. 2014), key(name) an odd hash of the name: a
  single changed word always shows, words in the wrong place or tensors under the wrong name all but certainly.
- mix is a bijection of 64-bit words (xorshift, multiply, xorshift) that lets each bit reach the low ones; without it
  an even number of flipped sign bits would cancel: 2^63 times any two odd numbers is the same.
- mix(0) = 0: zeros (vocabulary padding) have digest 0 and need no name.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd, prod

import torch

WORD_BYTES = 8
_MASK = (1 << 64) - 1
_LOW_HALF = (1 << 32) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_ROW_SEED, _COLUMN_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344
# A quarter of a MiB a chunk: input and temporaries stay in the L2 cache of a core, and torch runs an operation of this
# size on the calling thread. Larger ones it would split over OpenMP threads, whose barriers cost fifty times the work
# as soon as another process wants the same cores. A GPU wants fewer, larger launches.
_CHUNK_WORDS = {"cpu": 1 << 15}
_GPU_CHUNK_WORDS = 1 << 22
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Box = tuple[Sequence[int], Sequence[int]]
"""Starts and stops (exclusive) in every dimension."""


class DigestError(ValueError):
    """A view is not the box that it is said to be, or is cut inside a word."""


def granule(shape: Sequence[int], itemsize: int, column_cuts: Iterable[int] = ()) -> int:
    """Bytes of a word for a tensor: the most, up to 8, that divide the row and every cut of the last dimension.

    Args:
        column_cuts: where any side cuts the last dimension, in elements.

    Both sides must use the same: it is part of the plan. At least one element, at most 8 bytes.
    """
    columns = shape[-1] if shape else 1
    bytes_ = gcd(WORD_BYTES, columns * itemsize, *(cut * itemsize for cut in column_cuts))
    return max(bytes_, itemsize)


def digest(view: torch.Tensor, name: str, shape: Sequence[int], box: Box, granule_bytes: int) -> int:
    """Digest of `view`, the elements `box` of the logical tensor `name`, whose whole shape is `shape`.

    Args:
        view: as many dimensions as `shape`; any strides, any device.
        granule_bytes: from `granule`, the same on all sides.

    Raises:
        DigestError: the view has not the box's shape, the box lies outside of the tensor or is not cut at whole words.
    """
    starts, stops = map(tuple, box)
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    outside = any(start < 0 for start in starts) or any(map(int.__gt__, stops, shape))
    if tuple(view.shape) != lengths or len(shape) != len(stops) or outside:
        raise DigestError(f"{name}: {tuple(view.shape)} elements cannot be {starts} to {stops} of {tuple(shape)}")
    return int(_digest(view.detach(), name, tuple(shape), starts, granule_bytes)) & _MASK


def _digest(
    view: torch.Tensor, name: str, shape: tuple[int, ...], starts: tuple[int, ...], granule_bytes: int
) -> torch.Tensor:
    """A scalar int64 tensor on the device of `view`."""
    if not shape:
        view, shape, starts = view.reshape(1), (1,), (0,)
    itemsize = view.element_size()
    first, length = starts[-1] * itemsize, view.shape[-1] * itemsize
    if granule_bytes not in _INTEGER_OF or first % granule_bytes or length % granule_bytes:
        raise DigestError(f"{name}: bytes {first} to {first + length} of a row are not whole words of {granule_bytes}")
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    if view.numel() == 0:
        return total
    columns = _stream(_COLUMN_SEED, first // granule_bytes + length // granule_bytes, view.device)
    columns = columns[first // granule_bytes :]
    rows = _row_weights(shape, starts, view)
    for row, column, chunk in _chunks(view.reshape(-1, view.shape[-1]), granule_bytes):
        mixed = _mix(_words(chunk, granule_bytes))
        of_rows = _times(mixed, columns[column : column + mixed.shape[1]])
        total += _times(of_rows[None], rows[row : row + mixed.shape[0]])[0]
    return total * _signed(_name_key(name))


def _row_weights(shape: tuple[int, ...], starts: tuple[int, ...], view: torch.Tensor) -> torch.Tensor:
    stream = _stream(_ROW_SEED, prod(shape[:-1]), view.device)
    if len(shape) == 1:
        return stream
    if len(shape) == 2:
        return stream[starts[0] : starts[0] + view.shape[0]]
    index = torch.zeros((), dtype=torch.int64, device=view.device)
    for dim in range(len(shape) - 1):
        along = torch.arange(starts[dim], starts[dim] + view.shape[dim], device=view.device)
        index = index[..., None] * shape[dim] + along
    return stream[index.reshape(-1)]


def _chunks(matrix: torch.Tensor, granule_bytes: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, first word of the row, part of the matrix): parts of at most a chunk, whole rows where they fit."""
    words = _CHUNK_WORDS.get(matrix.device.type, _GPU_CHUNK_WORDS)
    per_word = granule_bytes // matrix.element_size()
    row_words = matrix.shape[1] // per_word
    rows, columns = max(1, words // row_words), min(words, row_words)
    for row in range(0, matrix.shape[0], rows):
        for column in range(0, row_words, columns):
            yield row, column, matrix[row : row + rows, column * per_word : (column + columns) * per_word]


def _words(chunk: torch.Tensor, granule_bytes: int) -> torch.Tensor:
    """[rows, words] of int64, not to be written to; narrower words are extended by zeros."""
    in_place = [chunk.storage_offset(), chunk.stride(0)]
    if chunk.stride(1) != 1 or any(count * chunk.element_size() % granule_bytes for count in in_place):
        chunk = chunk.clone(memory_format=torch.contiguous_format)
    words = chunk.view(_INTEGER_OF[granule_bytes])
    if granule_bytes == WORD_BYTES:
        return words
    return words.to(torch.int64).bitwise_and_((1 << 8 * granule_bytes) - 1)


def _mix(words: torch.Tensor) -> torch.Tensor:
    mixed = _fold(words)
    mixed.mul_(_signed(_GAMMA))
    return _fold(mixed)


def _fold(words: torch.Tensor) -> torch.Tensor:
    """w ^ (w >>> 32): int64 shifts keep the sign, so the high half is masked away."""
    return torch.bitwise_right_shift(words, 32).bitwise_and_(_LOW_HALF).bitwise_xor_(words)


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """matrix @ vector modulo 2^64; CUDA has no integer product of its own."""
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector)
    return _times_by_sum(matrix, vector)


def _times_by_sum(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (matrix * vector).sum(dim=1)


def _stream(seed: int, length: int, device: torch.device) -> torch.Tensor:
    """The first `length` odd numbers of a stream."""
    capacity = 1 << max(10, (length - 1).bit_length())
    return _whole_stream(seed, capacity, device)[:length]


@lru_cache(maxsize=64)
def _whole_stream(seed: int, capacity: int, device: torch.device) -> torch.Tensor:
    values = torch.arange(1, capacity + 1, dtype=torch.int64, device=device)
    values = values * _signed(_GAMMA) + _signed(seed)
    for shift, factor in _SPLITMIX:
        values = (values ^ _logical_shift(values, shift)) * _signed(factor)
    return (values ^ _logical_shift(values, 31)) | 1


def _logical_shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=1 << 16)
def _name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    return value - (1 << 64) if value >> 63 else value
