"""Files of either format, planned to the byte before the first is written.

Flows in: the tensors that are to be written. Flows out: files in a directory, filled some rows at a time.
Invariants: the same tensors and sizes give the same files, so that a conversion that was interrupted goes on; what
makes a directory loadable (an index, `config.json`) is written when all files are done.
"""

import io
import json
import os
import pickle
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slimerl.conversion.blueprint import Blueprint, Parameter
from slimerl.conversion.files import LENGTH_BYTES, Bytes, OpenFiles, Stored, TensorRange, memory_of, safetensors_header
from slimerl.conversion.sources import DistSource, FileRange, SafetensorsFiles
from slimerl.conversion.torch_format import INDEX, Envelope, envelope
from slimerl.resharding.hf_checkpoint import INDEX as HF_INDEX
from slimerl.resharding.hf_checkpoint import SINGLE, CheckpointError

PART_BYTES = 256 * 2**20
"""A parameter is stored in parts of at most so many bytes: a rank that loads its share reads whole parts."""


class TargetFile(NamedTuple):
    name: str
    nbytes: int
    tensors: tuple[str, ...]
    """Hugging Face names of those whose rows all lie in this file."""


class Reader(Protocol):
    """What finds tensors in the files of a target, by what these say of themselves."""

    def ranges(self, name: str) -> list[FileRange]:
        """Where a tensor's rows lie, one after the other. Raises CheckpointError."""


class Target(Protocol):
    """A checkpoint that is written."""

    @property
    def files(self) -> Sequence[TargetFile]: ...
    def create(self, file: TargetFile) -> None:
        """Everything of a file but the tensors' bytes. Raises OSError."""

    def write(self, name: str, first: int, data: Bytes) -> None:
        """Rows of a tensor, from row `first` on. Raises OSError."""

    def seal(self, file: TargetFile) -> None:
        """All of its tensors are written: from now on it can be read. Raises OSError."""

    def reader(self) -> Reader:
        """Finds tensors in the files as they are now, in the way of the format."""

    def release(self, file: TargetFile) -> None:
        """Nobody reads or writes the file any more."""

    def finish(self) -> None:
        """Makes the directory one that can be loaded. Raises OSError."""

    def close(self) -> None: ...


def _create(files: OpenFiles, file: TargetFile, parts: Sequence[tuple[int, bytes]]) -> None:
    with (files.directory / file.name).open("wb") as handle:
        handle.truncate(file.nbytes)
    for offset, data in parts:
        files.write(file.name, offset, data)


class HfTarget:
    """Safetensors files of at most `shard_bytes`, if no tensor is larger."""

    def __init__(self, directory: Path, tensors: Mapping[str, Stored], shard_bytes: int) -> None:
        groups: list[dict[str, Stored]] = [{}]
        size = 0
        for name, stored in tensors.items():
            if groups[-1] and size + stored.nbytes > shard_bytes:
                groups.append({})
                size = 0
            groups[-1][name] = stored
            size += stored.nbytes
        count = len(groups)
        self._headers: dict[str, bytes] = {}
        self._ranges: dict[str, tuple[str, TensorRange]] = {}
        self.files: list[TargetFile] = []
        for number, group in enumerate(groups, start=1):
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._headers[file], ranges = safetensors_header(group)
            self._ranges |= {name: (file, found) for name, found in ranges.items()}
            nbytes = len(self._headers[file]) + sum(stored.nbytes for stored in group.values())
            self.files.append(TargetFile(file, nbytes, tuple(group)))
        self._directory, self._open = directory, OpenFiles(directory, writable=True)

    def create(self, file: TargetFile) -> None:
        # a header of no length: nothing reads the file
        _create(self._open, file, [(LENGTH_BYTES, self._headers[file.name][LENGTH_BYTES:])])

    def seal(self, file: TargetFile) -> None:
        self._open.write(file.name, 0, self._headers[file.name][:LENGTH_BYTES])

    def write(self, name: str, first: int, data: Bytes) -> None:
        file, found = self._ranges[name]
        self._open.write(file, found.offset + first * found.stored.row_bytes, memory_of(data))

    def reader(self) -> SafetensorsFiles:
        return SafetensorsFiles(self._open, {name: file for name, (file, _) in self._ranges.items()})

    def release(self, file: TargetFile) -> None:
        self._open.release(file.name)

    def finish(self) -> None:
        if len(self.files) == 1:
            return
        total = sum(found.stored.nbytes for _, found in self._ranges.values())
        weight_map = {name: file for name, (file, _) in sorted(self._ranges.items())}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._directory / HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        self._open.close()


@dataclass(frozen=True)
class _Part:
    """Rows of a parameter, as one range of a file."""

    parameter: Parameter
    first: int
    last: int
    file: str
    offset: int
    envelope: Envelope

    @property
    def payload(self) -> int:
        return self.offset + len(self.envelope.before)


class DistTarget:
    """Megatron's distributed checkpoint of a model: the parts that a single rank would write."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        plan: Blueprint,
        tensors: Mapping[str, Stored],
        shard_bytes: int,
    ) -> None:
        """Raises CheckpointError where tensors that Megatron holds in one have several dtypes."""
        self._directory, self._config, self.plan, self._tensors = directory, config, plan, tensors
        self._open = OpenFiles(directory, writable=True)
        self._reader: DistSource | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[int, list[_Part]] = {}
        self.files: list[TargetFile] = []
        held: list[str] = []
        file, end = "__0_0.distcp", 0
        for parameter in plan.parameters:
            dtype = self._dtype(parameter)
            for first, last, each in _cut(parameter, dtype):
                self._parts.setdefault(id(parameter), []).append(_Part(parameter, first, last, file, end, each))
                end += each.nbytes
            held += dict.fromkeys(rows.tensor for rows in parameter.rows)
            if end >= shard_bytes or parameter is plan.parameters[-1]:
                self.files.append(TargetFile(file, end, tuple(held)))
                file, end, held = f"__{len(self.files)}_0.distcp", 0, []

    def create(self, file: TargetFile) -> None:
        parts = [part for name in file.tensors for part in self._parts[id(self.plan.holder[name])]]
        around = {part.offset: part.envelope.before for part in parts}
        around |= {part.payload + part.envelope.payload: part.envelope.after for part in parts}
        _create(self._open, file, sorted(around.items()))

    def write(self, name: str, first: int, data: Bytes) -> None:
        row_bytes = self._tensors[name].row_bytes
        last = first + len(data) // row_bytes
        parts = self._parts[id(self.plan.holder[name])]
        for rows in self.plan.rows[name]:
            start, stop = max(first, rows.first), min(last, rows.last)
            while start < stop:
                at = rows.at + start - rows.first
                part = parts[bisect_right(parts, at, key=lambda part: part.first) - 1]
                count = min(stop - start, part.last - at)
                offset = part.payload + (at - part.first) * row_bytes
                begin = (start - first) * row_bytes
                self._open.write(part.file, offset, memory_of(data[begin : begin + count * row_bytes]))
                start += count

    def seal(self, file: TargetFile) -> None:
        """Nothing reads it without the index."""

    def reader(self) -> DistSource:
        self._reader = DistSource(self._directory, self._config, self.plan, self._index())
        return self._reader

    def release(self, file: TargetFile) -> None:
        self._open.release(file.name)
        if self._reader is not None:
            self._reader.files.release(file.name)

    def finish(self) -> None:
        (self._directory / INDEX).write_bytes(pickle.dumps(self._index()))
        # into memory first: of a full disk torch would tell in an error of its own, and not which file
        common = io.BytesIO()
        torch.save({}, common)
        (self._directory / "common.pt").write_bytes(common.getvalue())
        (self._directory / "metadata.json").write_text(json.dumps(FORMAT) + "\n")

    def close(self) -> None:
        self._open.close()
        if self._reader is not None:
            self._reader.close()

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        dtypes = {self._tensors[rows.tensor].dtype for rows in parameter.rows}
        dtypes |= {self._dtypes.setdefault(parameter.key.name, next(iter(dtypes)))}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"Megatron holds {', '.join(dict.fromkeys(rows.tensor for rows in parameter.rows))} in one tensor "
                f"{parameter.key.name}, but here it would be {', '.join(map(str, dtypes))}; bring them to one dtype"
            )
        return next(iter(dtypes))

    def _index(self) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for parameter in self.plan.parameters:
            depth = len(parameter.key.lead)
            whole = torch.Size((*parameter.lead_sizes, *parameter.shape))
            properties = TensorProperties(dtype=self._dtypes[parameter.key.name])
            for part in self._parts[id(parameter)]:
                offsets = torch.Size((*parameter.key.lead, part.first, *(0 for _ in parameter.shape[1:])))
                sizes = torch.Size((*(1 for _ in range(depth)), part.last - part.first, *parameter.shape[1:]))
                info = _StorageInfo(part.file, part.offset, part.envelope.nbytes)
                # other names are further entries for the same bytes: whatever layers a trainer has, it finds them
                for name in (parameter.key.name, *parameter.spellings):
                    entry = entries.setdefault(name, TensorStorageMetadata(properties, whole, []))
                    assert isinstance(entry, TensorStorageMetadata)
                    entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
                    places[MetadataIndex(name, offsets, len(entry.chunks) - 1)] = info
        index = Metadata(entries, storage_data=places, storage_meta=StorageMeta())
        # Megatron's own field: tensors that were flattened; here none is
        index.mcore_data = {}  # type: ignore[attr-defined]
        return index


FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What `metadata.json` says, by which Megatron knows its checkpoints."""


def _cut(parameter: Parameter, dtype: torch.dtype) -> list[tuple[int, int, Envelope]]:
    """Ranges of rows, with the envelope of each."""
    stored = Stored(parameter.shape, dtype)
    height = max(1, PART_BYTES // stored.row_bytes)
    leading = (1,) * len(parameter.lead_sizes)
    cut = []
    for first in range(0, stored.rows, height):
        last = min(first + height, stored.rows)
        cut.append((first, last, envelope((*leading, last - first, *parameter.shape[1:]), dtype)))
    return cut


def flush(directory: Path, name: str) -> None:
    """Wait until a file is on the disk. Raises OSError."""
    descriptor = os.open(directory / name, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
