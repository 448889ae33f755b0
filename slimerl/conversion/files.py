"""Byte ranges of the files of a directory, for several threads at once.

Flows in: names, offsets. Flows out: bytes in buffers of the caller. Invariant: a range is read whole or an error names
the file; what is opened for reading is never written to.
"""

import json
import os
import threading
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slimerl.resharding.hf_checkpoint import CheckpointError

Bytes = NDArray[np.uint8]
"""One dimension, contiguous."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of dtypes."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


class Stored(NamedTuple):
    """A tensor as a checkpoint holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def memory_of(data: Bytes) -> memoryview:
    """The same bytes, as files take them."""
    return data.data


class OpenFiles:
    """The files of a directory, each opened when it is first asked for."""

    def __init__(self, directory: Path, writable: bool = False) -> None:
        self.directory = directory
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> int:
        """The descriptor. Raises CheckpointError where the file is not there."""
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = os.open(self.directory / name, self._flags)
                except OSError as error:
                    raise CheckpointError(f"{self.directory / name}: {error.strerror}") from error
            return self._open[name]

    def read(self, name: str, offset: int, out: Bytes) -> None:
        """Fill `out`. Raises CheckpointError where the file ends before, or the disk does not give it."""
        view, done = memory_of(out), 0
        while done < len(view):
            try:
                count = os.preadv(self.of(name), [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.directory / name} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.directory / name} ends at byte {offset + done}: it is truncated")
            done += count

    def write(self, name: str, offset: int, data: memoryview | bytes) -> None:
        """Raises OSError."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self.of(name), view[done:], offset + done)

    def release(self, name: str) -> None:
        """A large checkpoint has more files than a process may have open."""
        with self._lock:
            if name in self._open:
                os.close(self._open.pop(name))

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


class TensorRange(NamedTuple):
    """Where a safetensors file has a tensor."""

    stored: Stored
    offset: int


def safetensors_header(tensors: dict[str, Stored]) -> tuple[bytes, dict[str, TensorRange]]:
    """The beginning of a safetensors file of these tensors, and where each will lie."""
    # the widest first, so that each is aligned
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in ordered:
        spelled = {"dtype": _NAMES[stored.dtype], "shape": stored.shape, "data_offsets": [end, end + stored.nbytes]}
        header[name] = spelled
        end += stored.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    ranges = {name: TensorRange(stored, start + header[name]["data_offsets"][0]) for name, stored in tensors.items()}
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, ranges


def read_safetensors_header(files: OpenFiles, name: str) -> dict[str, TensorRange]:
    """Where the tensors of a file lie.

    Raises:
        CheckpointError: the file is no safetensors file, or its length is not what its header says.
    """
    path = files.directory / name
    try:
        length = np.empty(LENGTH_BYTES, np.uint8)
        files.read(name, 0, length)
        count, size = int.from_bytes(length.tobytes(), "little"), os.fstat(files.of(name)).st_size
        if count > size - LENGTH_BYTES:
            raise ValueError(f"a header of {count} bytes in a file of {size}")
        text = np.empty(count, np.uint8)
        files.read(name, LENGTH_BYTES, text)
        header = json.loads(text.tobytes())
        header.pop("__metadata__", None)
        start = LENGTH_BYTES + count
        ranges = {tensor: _range(spelled, start) for tensor, spelled in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has no header that can be read: {error}") from error
    end = max((each.offset + each.stored.nbytes for each in ranges.values()), default=start)
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes instead of {end}: truncated, or another file's header")
    return ranges


def _range(spelled: dict[str, Any], start: int) -> TensorRange:
    stored = Stored(tuple(map(int, spelled["shape"])), _DTYPES[spelled["dtype"]])
    first, last = spelled["data_offsets"]
    if last - first != stored.nbytes or first < 0:
        raise ValueError(f"{last - first} bytes for a tensor {stored.shape} {stored.dtype}")
    return TensorRange(stored, start + first)
