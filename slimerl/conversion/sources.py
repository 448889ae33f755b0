"""Tensors by Hugging Face name, some rows at a time, out of either format.

Flows in: a checkpoint directory. Flows out: bytes in buffers of the caller. Invariant: opening a source has checked
that every tensor of the model is there in its shape; reading it is safe for several threads at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from slimerl.conversion.blueprint import Blueprint, Key, Parameter, blueprint
from slimerl.conversion.files import Bytes, OpenFiles, Stored, TensorRange, read_safetensors_header
from slimerl.conversion.torch_format import payload_offset, read_index
from slimerl.resharding.coverage import some_names
from slimerl.resharding.families import BlockScales, family_of, model_dtype
from slimerl.resharding.families.family import Form
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint, check_keys, read_config
from slimerl.resharding.quantise import Quantised, dequantise


class Source(Protocol):
    """A checkpoint that is read."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """By Hugging Face name."""

    def read(self, name: str, first: int, last: int, out: Bytes) -> None:
        """Rows `first` to `last`, row-major, into `out`. Raises CheckpointError."""


class FileRange(NamedTuple):
    """Where bytes lie."""

    file: str
    offset: int
    nbytes: int


class SafetensorsFiles:
    """Tensors of safetensors files, as they are stored; `file_of`: the file of each."""

    def __init__(self, files: OpenFiles, file_of: Mapping[str, str]) -> None:
        self.files, self.file_of = files, file_of
        self._ranges: dict[str, dict[str, TensorRange]] = {}

    def stored(self, name: str) -> Stored:
        return self._range(name).stored

    def read(self, name: str, first: int, last: int, out: Bytes) -> None:
        found = self._range(name)
        self.files.read(self.file_of[name], found.offset + first * found.stored.row_bytes, out)

    def ranges(self, name: str) -> list[FileRange]:
        found = self._range(name)
        return [FileRange(self.file_of[name], found.offset, found.stored.nbytes)]

    def _range(self, name: str) -> TensorRange:
        file = self.file_of[name]
        if file not in self._ranges:
            self._ranges[file] = read_safetensors_header(self.files, file)
        if name not in self._ranges[file]:
            raise CheckpointError(f"{self.files.directory / file} has no tensor {name}, though the index says so")
        return self._ranges[file][name]


class HfSource:
    """A Hugging Face checkpoint; FP8 blocks come out multiplied by their scales, in the dtype of config.json.

    Attributes:
        prediction: has the multi-token-prediction layer.
        copies: tensors that repeat others, by their names.
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError or ConfigError."""
        self.directory, self.config = directory, read_config(directory)
        self._scales = BlockScales.of(self.config)
        family = family_of(self.config)
        with HfCheckpoint(directory) as checkpoint:
            # of a prediction layer there is all or nothing
            self.prediction = bool(family.unused_tensors(self.config) & checkpoint.keys())
            form = Form(prediction=self.prediction, scales=self._scales)
            aliases = family.aliases(self.config)
            check_keys(checkpoint, family.logical_tensors(self.config, form=form), unused=aliases)
            self.copies = {name: of for name, of in aliases.items() if name in checkpoint}
            file_of = {name: checkpoint.file_of(name) for name in checkpoint}
        self._files = SafetensorsFiles(OpenFiles(directory), file_of)
        plain = family.logical_tensors(self.config, form=Form(prediction=self.prediction))
        self.tensors = {name: self._stored(name) for name in [*(each.name for each in plain), *self.copies]}
        for name, of in self.copies.items():
            if self.tensors[name] != self.tensors[of]:
                raise CheckpointError(f"{directory}: {name} should repeat {of}, but has another shape or dtype")

    def read(self, name: str, first: int, last: int, out: Bytes) -> None:
        if not self._is_quantised(name):
            self._files.read(name, first, last, out)
            return
        assert self._scales is not None
        block, columns = self._scales.block, self.tensors[name].shape[1]
        data = np.empty((last - first, columns), np.uint8)
        self._files.read(name, first, last, data.reshape(-1))
        top, below = first // block, self._scales.blocks(last)
        of_blocks = np.empty((below - top, self._scales.blocks(columns)), np.float32)
        self._files.read(scale_name(name), top, below, of_blocks.reshape(-1).view(np.uint8))
        if not np.isfinite(of_blocks).all():
            wrong = of_blocks[~np.isfinite(of_blocks)][0]
            raise CheckpointError(f"{self.directory}: {scale_name(name)} has a scale of {wrong}; fetch it anew")
        quantised = Quantised(torch.from_numpy(data).view(torch.float8_e4m3fn), torch.from_numpy(of_blocks))
        plain = dequantise(quantised, self._scales, self.tensors[name].dtype, first % block)
        out[:] = plain.view(torch.uint8).numpy().reshape(-1)

    def close(self) -> None:
        self._files.files.close()

    def _is_quantised(self, name: str) -> bool:
        return self._scales is not None and scale_name(name) in self._files.file_of

    def _stored(self, name: str) -> Stored:
        found = self._files.stored(name)
        if not self._is_quantised(name):
            if found.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise CheckpointError(
                    f"{self.directory}: {name} is {found.dtype}, but nothing says by what scales it is multiplied: "
                    "config.json needs the quantization_config that it was written with"
                )
            return found
        scale = self._files.stored(scale_name(name))
        if found.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
            raise CheckpointError(
                f"{self.directory}: {name} is {found.dtype} with scales of {scale.dtype}; FP8 blocks are "
                "float8_e4m3fn with float32 scales"
            )
        return Stored(found.shape, model_dtype(self.config))


class _Part(NamedTuple):
    """A stored box of a parameter: rows and columns, and where it lies."""

    rows: range
    columns: range
    skipped_rows: int
    """Rows of its bytes that belong to other slices of the leading dimensions."""
    shape: tuple[int, ...]
    info: _StorageInfo


@dataclass(frozen=True)
class _Found:
    """A parameter in the checkpoint."""

    dtype: torch.dtype
    parts: list[_Part]


class DistSource:
    """The model in a distributed checkpoint of Megatron, whatever layout wrote it; the optimizer is not looked at."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        plan: Blueprint | None = None,
        index: Metadata | None = None,
    ) -> None:
        """`plan`: of that model, where it is known; `index`: of a directory that has none yet.

        Raises:
            CheckpointError: the directory is of another model, or no distributed checkpoint.
            ConfigError: config.json asks for what no table has.
        """
        self.directory = directory
        self._index = read_index(directory) if index is None else index
        self.files = OpenFiles(directory)
        self._payloads: dict[tuple[str, int], int] = {}
        self.prediction = any(key.startswith("mtp.") for key in self._index.state_dict_metadata)
        self.blueprint = blueprint(config, self.prediction) if plan is None else plan
        self._slices: dict[str, dict[tuple[int, ...], list[_Part]]] = {}
        self._found = {parameter.key: self._find(parameter) for parameter in self.blueprint.parameters}
        self._check_keys()
        self.tensors = {
            name: Stored(tensor.shape, self._found[self.blueprint.holder[name].key].dtype)
            for name, tensor in self.blueprint.tensors.items()
        }

    def read(self, name: str, first: int, last: int, out: Bytes) -> None:
        row_bytes = self.tensors[name].row_bytes
        table = out.reshape(last - first, row_bytes)
        found = self._found[self.blueprint.holder[name].key]
        for rows in self.blueprint.rows[name]:
            start, stop = max(first, rows.first), min(last, rows.last)
            if start < stop:
                shift = rows.at - rows.first
                self._read_rows(found, start + shift, stop + shift, table[start - first : stop - first])

    def ranges(self, name: str) -> list[FileRange]:
        """Where the rows of a tensor lie, one after the other; of a checkpoint that a single rank wrote."""
        row_bytes = self.tensors[name].row_bytes
        found = self._found[self.blueprint.holder[name].key]
        ranges = []
        for rows in self.blueprint.rows[name]:
            first, last = rows.at, rows.at + rows.last - rows.first
            for part in sorted(found.parts, key=lambda part: part.rows.start):
                start, stop = max(first, part.rows.start), min(last, part.rows.stop)
                if start < stop:
                    offset = self._payload(part, found.dtype)
                    offset += (part.skipped_rows + start - part.rows.start) * row_bytes
                    ranges.append(FileRange(str(part.info.relative_path), offset, (stop - start) * row_bytes))
        return ranges

    def close(self) -> None:
        self.files.close()

    def _read_rows(self, found: _Found, first: int, last: int, table: Bytes) -> None:
        """Rows of a parameter."""
        for part in found.parts:
            start, stop = max(first, part.rows.start), min(last, part.rows.stop)
            if start >= stop:
                continue
            size = found.dtype.itemsize
            width = len(part.columns) * size
            row = part.skipped_rows + start - part.rows.start
            offset = self._payload(part, found.dtype) + row * width
            target = table[start - first : stop - first, part.columns.start * size : part.columns.stop * size]
            if target.flags.c_contiguous:
                self.files.read(str(part.info.relative_path), offset, target.reshape(-1))
                continue
            read = np.empty((stop - start) * width, np.uint8)
            self.files.read(str(part.info.relative_path), offset, read)
            target[:] = read.reshape(stop - start, width)

    def _payload(self, part: _Part, dtype: torch.dtype) -> int:
        key = str(part.info.relative_path), part.info.offset
        if key not in self._payloads:
            self._payloads[key] = payload_offset(self.files.of(key[0]), part.info, part.shape, dtype)
        return self._payloads[key]

    def _find(self, parameter: Parameter) -> _Found:
        entries = self._index.state_dict_metadata
        key = next((key for key in parameter.names if key.name in entries), None)
        if key is None:
            raise CheckpointError(f"{self.directory} lacks {parameter.key.name}, which config.json asks for")
        entry = entries[key.name]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.directory}: {key.name} is no tensor")
        if key.name not in self._slices:
            self._slices[key.name] = self._parts(key, entry)
        parts = self._slices[key.name].get(key.lead, [])
        self._check_parts(key, tuple(entry.size), parameter.shape, parts)
        return _Found(entry.properties.dtype, parts)

    def _parts(self, key: Key, entry: TensorStorageMetadata) -> dict[tuple[int, ...], list[_Part]]:
        """What is stored of each slice of the leading dimensions."""
        depth = len(key.lead)
        found: dict[tuple[int, ...], list[_Part]] = {}
        for chunk in entry.chunks:
            info = self._index.storage_data.get(MetadataIndex(key.name, chunk.offsets))
            if info is None:
                raise CheckpointError(f"{self.directory}: the index lacks the place of {key.name} {chunk.offsets}")
            shape, offsets = tuple(chunk.sizes), tuple(chunk.offsets)
            rows, *columns = (range(at, at + size) for at, size in zip(offsets[depth:], shape[depth:], strict=True))
            if len(columns) > 1:
                raise CheckpointError(f"{self.directory}: {key.name} has {len(shape)} dimensions")
            slices = product(*(range(at, at + size) for at, size in zip(offsets[:depth], shape[:depth], strict=True)))
            for number, lead in enumerate(slices):
                part = _Part(rows, columns[0] if columns else range(1), number * len(rows), shape, info)
                found.setdefault(lead, []).append(part)
        return found

    def _check_parts(self, key: Key, whole: tuple[int, ...], shape: tuple[int, ...], parts: list[_Part]) -> None:
        rows, columns = shape[0], prod(shape[1:])
        own = whole[len(key.lead) :]
        # a vocabulary may be padded below
        if own[1:] != shape[1:] or own[0] < rows or (own[0] > rows and not _is_vocabulary(key.name)):
            raise CheckpointError(f"{self.directory}: {key.name} has shape {whole}, config.json asks for {shape}")
        held = sum(max(0, min(rows, part.rows.stop) - part.rows.start) * len(part.columns) for part in parts)
        if held != rows * columns:
            raise CheckpointError(f"{self.directory} holds {held} of the {rows * columns} elements of {key}")

    def _check_keys(self) -> None:
        """Nothing of a model is left over."""
        known = {key.name for parameter in self.blueprint.parameters for key in parameter.names}
        unknown = {
            key
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key.startswith(_MODEL) and key not in known
        }
        if unknown:
            raise CheckpointError(f"{self.directory} holds {some_names(unknown)}, which config.json does not ask for")


_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
"""How the keys of a model begin; an optimizer's and a schedule's begin otherwise."""


def _is_vocabulary(key: str) -> bool:
    return key in ("embedding.word_embeddings.weight", "output_layer.weight")


class Combined:
    """Tensors out of several sources; `origins`: source and name there, by name."""

    def __init__(self, origins: Mapping[str, tuple[Source, str]]) -> None:
        self._origins = origins
        self.tensors = {name: source.tensors[own] for name, (source, own) in origins.items()}

    def read(self, name: str, first: int, last: int, out: Bytes) -> None:
        source, own = self._origins[name]
        source.read(own, first, last, out)
