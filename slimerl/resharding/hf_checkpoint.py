"""Hugging Face checkpoints: safetensors read lazily, written atomically.

Flows in: a directory with `model.safetensors` or an index and its shards. Flows out: tensors by name; a new directory.
Invariant: a directory that stands under its final name is complete.
"""

import glob
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimerl.resharding.coverage import some_names
from slimerl.resharding.tensors import LogicalTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_GIB = 1024**3


class CheckpointError(ValueError):
    """A checkpoint is not readable, or not the one that is expected."""


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory. Raises CheckpointError."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, not an object")
    return config


class HfCheckpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory by name; one is read from disk each time that it is asked for.

    Example::

        with HfCheckpoint(directory) as checkpoint:
            check_keys(checkpoint, family.logical_tensors(config), family.aliases(config))
            scatter(placements, checkpoint, parameters, cast=True)
    """

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where the index and the files disagree, or a file is torn."""
        self.directory = directory
        self._file_of = _files_by_name(directory)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "HfCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the mapped files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handle(name).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Read from the file's header alone."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def holds_reals(self, name: str) -> bool:
        """Are its elements floating-point numbers, of whatever width? Read from the header."""
        return str(self._handle(name).get_slice(name).get_dtype()).startswith(("F", "BF"))

    def _handle(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _open_file(self.directory / file)
        return self._open[file]


def _open_file(path: Path) -> Any:
    try:
        # safetensors calls every file missing that it cannot open
        path.open("rb").close()
        return safe_open(path, framework="pt").__enter__()
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} (missing, torn or no safetensors file): {error}") from error


def _files_by_name(directory: Path) -> dict[str, str]:
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")
        with _open_file(directory / SINGLE) as handle:
            return dict.fromkeys(handle.keys(), SINGLE)
    try:
        file_of = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise CheckpointError(f"{index}: weight_map maps no names of tensors to names of files; fetch the index again")
    held: dict[str, set[str]] = {}
    for file in sorted(set(file_of.values())):
        with _open_file(directory / file) as handle:
            held[file] = set(handle.keys())
    if differing := set().union(*held.values()) ^ file_of.keys():
        raise CheckpointError(f"{index} and its files disagree about {some_names(differing)}")
    for name, file in file_of.items():
        if name not in held[file]:
            at = next(other for other, names in held.items() if name in names)
            raise CheckpointError(f"{index} has {name} in {file}, but it is in {at}; fetch the index again")
    return file_of


def check_keys(
    checkpoint: HfCheckpoint,
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str] | None = None,
    unused: Collection[str] = (),
) -> None:
    """The checkpoint has exactly these tensors in these shapes.

    Args:
        aliases: names that may stand there as well, if they equal the tensor that they repeat (a tied head).
        unused: names that may stand there as well and are not read (`Family.unused_tensors`: the prediction layer of
            a model that is built without).

    Raises:
        CheckpointError: names what is missing, unexpected or of another shape.
    """
    aliases = aliases or {}
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    where = f"checkpoint {checkpoint.directory}"
    if missing := wanted.keys() - checkpoint.keys():
        raise CheckpointError(f"{where} lacks {some_names(missing)}, which its config.json asks for")
    if unexpected := checkpoint.keys() - wanted.keys() - aliases.keys() - set(unused):
        raise CheckpointError(f"{where} has {some_names(unexpected)}, which its config.json does not ask for")
    for name, shape in wanted.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(f"{where}: {name} has shape {checkpoint.shape(name)}, config.json says {shape}")
        if not checkpoint.holds_reals(name):
            raise CheckpointError(
                f"{where}: {name} holds whole numbers, which are no weights; fetch it again unquantised"
            )
    for name in sorted(aliases.keys() & checkpoint.keys()):
        if not torch.equal(checkpoint[name], checkpoint[aliases[name]]):
            raise CheckpointError(f"{where}: {name} should repeat {aliases[name]} (tied), but it differs")


def write_checkpoint(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    shard_bytes: int = 4 * _GIB,
    overwrite: bool = False,
    changed: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` as they come, with the configuration and tokenizer files of the checkpoint `source`.

    All is written to a directory beside the final one and renamed when complete; where a link stands under the final
    name, all that is where it leads. `config.json` gets the dtype of the tensors, and what is `changed`.

    Raises:
        FileExistsError: `directory` exists and `overwrite` is False.
        CheckpointError: no tensors, or a name twice.
    """
    if directory.exists() and not overwrite:
        raise FileExistsError(f"{directory} exists; remove it or choose another export path")
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    # those, too, of processes that were killed while they wrote one: each is as large as the model
    for old in directory.parent.glob(f".{glob.escape(directory.name)}.partial-*"):
        writer = old.name.rpartition("-")[2]
        if old == partial or not (writer.isdecimal() and psutil.pid_exists(int(writer))):
            shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    try:
        dtype = _write_shards(partial, tensors, shard_bytes)
        copy_companions(source, partial, dtype, changed)
        _flush(partial)
        put_in_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> torch.dtype:
    """Returns the dtype of most bytes."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    size, total, seen = 0, 0, set[str]()
    by_dtype: dict[torch.dtype, int] = {}

    def flush() -> None:
        shards.append(list(pending))
        shard = directory / f"{len(shards)}.partial"
        save_file(pending, shard, metadata={"format": "pt"})
        # safetensors lets nobody but the owner read it; the directory's mode says what the umask allows
        shard.chmod(directory.stat().st_mode & 0o666)
        pending.clear()

    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name} is written twice")
        seen.add(name)
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        # A copy: the caller may use its buffer again before the shard is full.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
    if not seen:
        raise CheckpointError(f"no tensors to write to {directory}")
    flush()
    _name_shards(directory, shards, total)
    return max(by_dtype, key=lambda dtype: by_dtype[dtype])


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (directory / "1.partial").rename(directory / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / f"{number}.partial").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def is_companion(path: Path) -> bool:
    """Whether a file of a checkpoint's directory is one of configuration or tokenizer."""
    return path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json")


def copy_companions(source: Path, target: Path, dtype: torch.dtype, changed: Mapping[str, Any] | None = None) -> None:
    """Configuration and tokenizer files; `config.json` gets the dtype, and what is `changed`."""
    for path in sorted(source.iterdir()):
        if is_companion(path):
            shutil.copyfile(path, target / path.name)
    config = read_config(target)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config |= changed or {}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _flush(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(complete: Path, directory: Path) -> None:
    """Rename a complete directory, in the place of an older one. Raises OSError; then the older one is back."""
    replaced = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
    if directory.exists():
        directory.rename(replaced)
    try:
        complete.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    # those, too, of processes that were killed while they removed one
    for old in directory.parent.glob(f".{glob.escape(directory.name)}.replaced-*"):
        shutil.rmtree(old, ignore_errors=True)
    # The new name itself must survive a power cut.
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
