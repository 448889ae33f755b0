"""Directories that the run writes: may they be written, is there room, and do they hold nothing that would be lost?

Flows in: the spec, the parsed `config.json`. Flows out: faults. Invariant: nothing is left on the disk.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimerl.conductor.estimate import DTYPES, RECORD_BYTES
from slimerl.conductor.preflight.scored import critic_config
from slimerl.conductor.run_directory import USED_NAMES
from slimerl.spec import RunSpec
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR
from slimerl.training.memory_estimate import GIB, checkpoint_bytes, export_bytes


def disk_faults(spec: RunSpec, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Without a `config` the room for the model is not known, and only that for the run's record is asked for."""
    directories = {"output_dir": spec.run_dir, "training.export_path": spec.export_dir}
    # the export replaces what is there: it is written beside it
    written = directories | {"training.export_path": _beside(spec.export_dir)}
    # how much of it this node will need depends on who runs here
    near = {} if spec.checkpoint.local_dir is None else {"checkpoint.local_dir": spec.checkpoint.local_dir}
    unusable = [*_unwritable(directories | near), *_lost_by_export(spec)]
    unusable = unusable or list(_unwritable(written))
    yield from unusable
    if not unusable:
        yield from _too_full(directories, written_bytes(spec, config))


def written_bytes(spec: RunSpec, config: Mapping[str, Any] | None) -> dict[str, int]:
    """What is written under each key's directory while the run lasts, at most."""
    record = RECORD_BYTES
    if config is None:
        return {"output_dir": record, "training.export_path": 0}
    dtype = DTYPES[spec.model.dtype]
    exported = export_bytes(config, dtype)
    if spec.checkpoint.every_steps:
        # the new one is written before the oldest is removed
        kept = min(spec.checkpoint.keep_last + 1, -(-spec.training.steps // spec.checkpoint.every_steps))
        each = checkpoint_bytes(config, dtype)
        if spec.algorithm.has_critic:
            each += checkpoint_bytes(critic_config(spec) or config, dtype)
        record += max(0, kept * each - _size(spec.run_dir / CHECKPOINTS_DIR))
    if spec.uses_engines and spec.sync.transport == "disk":
        record += exported
    return {"output_dir": record, "training.export_path": exported}


def _size(directory: Path) -> int:
    """Bytes of the files below it: what an earlier part of the run left there is replaced, not added to."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def _beside(directory: Path) -> Path:
    """Where the export is written until it is complete: beside where a link leads."""
    return directory.resolve().parent


def _unwritable(directories: Mapping[str, Path]) -> Iterator[str]:
    seen = set()
    for key, directory in directories.items():
        existing = _existing(directory)
        if existing in seen:
            continue
        seen.add(existing)
        if not existing.is_dir():
            yield f"{key}: {existing} is a file, not a directory; set {key} to another place"
        elif reason := _refusal(existing):
            yield f"{key}: {existing} is not writable ({reason}); set {key} to a directory that is"


def _refusal(directory: Path) -> str | None:
    """Why a file cannot be made there; None: it can. Permission bits say little: root passes them all, and a mount
    may be read-only."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def _too_full(directories: Mapping[str, Path], needed: Mapping[str, int]) -> Iterator[str]:
    """Directories on one file system share its room."""
    by_device: dict[int, list[str]] = {}
    for key, directory in directories.items():
        by_device.setdefault(_existing(directory).stat().st_dev, []).append(key)
    for keys in by_device.values():
        total, free = sum(needed[key] for key in keys), free_bytes(_existing(directories[keys[0]]))
        if free < total:
            yield (
                f"{', '.join(keys)}: the disk of {_existing(directories[keys[0]])} has {free / GIB:.2f} GiB free, the "
                f"run writes up to {total / GIB:.2f} GiB; make room, set {' and '.join(keys)} to another disk, or "
                "lower checkpoint.keep_last"
            )


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _lost_by_export(spec: RunSpec) -> Iterator[str]:
    """The export replaces its directory as a whole: it must not be one that holds something else."""
    key, target = "training.export_path", spec.export_dir.resolve()
    for kept in (Path.cwd(), spec.run_dir, *spec.input_paths.values()):
        if target == kept.resolve() or target in kept.resolve().parents:
            yield f"{key}: {target} would be replaced, but holds {kept}; set {key} to a directory of its own"
            return
    for name in USED_NAMES:
        used = (spec.run_dir / name).resolve()
        if target == used or used in target.parents or target in used.parents:
            yield (
                f"{key}: {target} would be replaced, but {spec.run_dir / name} is the run's own; leave {key} out "
                f"(the model goes to {spec.run_dir / 'model'}) or set it to a directory of its own"
            )
            return
    if target.is_mount():
        yield f"{key}: {target} is where a disk is mounted and cannot be replaced; set {key} to a directory in it"
    elif target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        yield f"{key}: {target} exists and is no checkpoint; set {key} to a directory of its own"
