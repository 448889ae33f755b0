"""The files of torch's distributed checkpoints, read and written as byte ranges.

Such a directory has `.metadata`, a pickled index from tensor parts to ranges of the other files; each range is what
`torch.save` writes of one part: a ZIP archive that holds the part's raw bytes uncompressed. Flows in: shapes, or a
range of a file. Flows out: the bytes around the raw ones, or where these begin.
Invariant: no tensor is ever in memory, and of a pickle nothing is called but the few names listed here.
"""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import skip_data

from slimerl.resharding.hf_checkpoint import CheckpointError

INDEX = ".metadata"
_LOCAL_HEADER = 30
"""Bytes of a ZIP entry's header before its name."""


@dataclass(frozen=True)
class Envelope:
    """What `torch.save` writes around the raw bytes of a contiguous tensor."""

    before: bytes
    payload: int
    """Raw bytes between the two."""
    after: bytes

    @property
    def nbytes(self) -> int:
        return len(self.before) + self.payload + len(self.after)


@cache
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Of a tensor of this shape; the checksum of the raw bytes is left zero, as torch does not look at it."""
    taken = _Taken()
    # the memory is never touched, so it costs address space alone
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], taken))
    payload = prod(shape) * dtype.itemsize
    before, after = taken.around_the_gap()
    if taken.size - len(before) - len(after) != payload:
        raise AssertionError(f"torch.save leaves {taken.size} bytes in an unknown form for {shape} {dtype}")
    return Envelope(before, payload, after)


class _Taken(io.RawIOBase):
    """A file that keeps what is written and where; what is skipped takes no memory."""

    def __init__(self) -> None:
        self.size, self._at = 0, 0
        self._written: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def write(self, data: Any) -> int:
        self._written.append((self._at, bytes(data)))
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def around_the_gap(self) -> tuple[bytes, bytes]:
        parts = [io.BytesIO(), io.BytesIO()]
        end, side = 0, 0
        for at, data in self._written:
            if at != end:
                side += 1
            parts[side].write(data)
            end = at + len(data)
        return parts[0].getvalue(), parts[1].getvalue()


class _Slice(io.RawIOBase):
    """`length` bytes of an open file, from `start` on."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        data = os.pread(self._descriptor, wanted, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def payload_offset(descriptor: int, info: _StorageInfo, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where in the file the raw bytes of a stored part begin.

    Raises:
        CheckpointError: it is not what `torch.save` writes of such a tensor.
    """
    where = f"{info.relative_path} at {info.offset}"
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{where}: the part is transformed ({info.transform_descriptors}); save it without")
    try:
        with io.BufferedReader(_Slice(descriptor, info.offset, info.length), 4096) as file:
            archive = zipfile.ZipFile(file)
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            saved = _TensorPickle(archive.read(names["data.pkl"])).load()
            raw = archive.getinfo(names["data/0"])
            file.seek(raw.header_offset)
            header = file.read(_LOCAL_HEADER)
    except (KeyError, OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{where}: no tensor can be read there ({error})") from error
    if not isinstance(saved, _Saved) or tuple(saved.shape) != shape or saved.stride != _contiguous(shape):
        raise CheckpointError(f"{where}: holds {saved}, not a contiguous tensor {shape}")
    if raw.compress_type != zipfile.ZIP_STORED or raw.file_size < prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: has {raw.file_size} bytes for a tensor {shape} {dtype}")
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.offset + raw.header_offset + _LOCAL_HEADER + skipped + saved.start * dtype.itemsize


class _Saved(NamedTuple):
    """What a tensor's pickle says of it."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _saved(_storage: object, start: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> _Saved:
    return _Saved(start, tuple(shape), tuple(stride))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, prod(shape[axis + 1 :])) for axis in range(len(shape)))


class _TensorPickle(pickle.Unpickler):
    """Reads the description of a tensor without making one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def persistent_load(self, identity: Any) -> Any:
        return identity

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _saved
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, torch.dtype) or name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} stands for no plain tensor")


_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath Path",
}


class _MetadataPickle(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = getattr(torch, name, None) if module == "torch" else None
        if isinstance(known, torch.dtype) or name in _METADATA_NAMES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")


def read_index(directory: Path) -> Metadata:
    """The index of a directory. Raises CheckpointError; nothing but the classes of an index is ever called."""
    path = directory / INDEX
    try:
        found = _MetadataPickle(io.BytesIO(path.read_bytes())).load()
    # a broken pickle raises whatever the step that it breaks raises
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, Mapping):
        raise CheckpointError(f"{path} is no index of a distributed checkpoint")
    return found
