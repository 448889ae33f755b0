"""A conversion from the first check to the rename.

Flows in: two directories. Flows out: a `Report`. Invariants: the source is only read; the target gets its name when
every file was flushed and read back, and its keys and digests are those of the source; an existing one stays until
then.

What a converted Megatron checkpoint holds beside Megatron's files: `hf/` (config.json, tokenizer), `conversion.json` (a
digest for each tensor), and the trainer's `manifest.json` (a digest for each file).
"""

import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from slimerl.conversion.blueprint import blueprint
from slimerl.conversion.files import Stored
from slimerl.conversion.sources import Combined, DistSource, HfSource, Source
from slimerl.conversion.stream import BAND_BYTES, Progress, Stream, digest_of
from slimerl.conversion.targets import DistTarget, HfTarget, Target, flush
from slimerl.conversion.torch_format import INDEX
from slimerl.conversion.workplace import JOURNAL, Workplace, combined_digest
from slimerl.resharding.coverage import some_names
from slimerl.resharding.families import family_of
from slimerl.resharding.hf_checkpoint import INDEX as HF_INDEX
from slimerl.resharding.hf_checkpoint import SINGLE, CheckpointError, copy_companions, is_companion, read_config
from slimerl.training.checkpoint import directory as manifests
from slimerl.training.checkpoint.directory import COMPANIONS, Manifest, entry_of, write_manifest

RECORD = "conversion.json"
GIB = 2**30
_PLAN_VERSION = 1


class Record(msgspec.Struct, frozen=True):
    """`conversion.json`. `tensors`: digests (XXH3, 128 bits) of their bytes by Hugging Face name; `copies`: names that
    repeat another tensor, and which; `digest`: of all."""

    tensors: dict[str, str]
    copies: dict[str, str]
    digest: str


@dataclass(frozen=True)
class Options:
    """`like`: a Hugging Face checkpoint that gives what a trainer's checkpoint has not: config.json, tokenizer, the
    multi-token-prediction layer. `shard_bytes`: of a file of the target, if no tensor is larger."""

    like: Path | None = None
    workers: int = 2
    shard_bytes: int = 4 * GIB
    overwrite: bool = False
    progress: Progress = lambda _stage, _bytes: None
    started: Progress = lambda _stage, _bytes: None
    """Told once how many bytes there are."""


@dataclass(frozen=True)
class Report:
    tensors: int
    nbytes: int
    """Of the tensors."""
    files: int
    kept_files: int
    """Written and verified by an earlier call that was interrupted."""
    seconds: float
    digest: str
    """Of all tensors; the same for the same weights in either format."""


@dataclass(frozen=True)
class _Plan:
    source: Source
    target: Target
    companions: Path
    copies: Mapping[str, str]
    recorded: Mapping[str, str]
    """Digests that the tensors must have."""
    dtype: torch.dtype


def is_distributed(checkpoint: Path) -> bool:
    """Whether a directory is a Megatron checkpoint; otherwise it should be a Hugging Face one."""
    return (checkpoint / INDEX).exists()


def convert(source: Path, target: Path, options: Options = Options()) -> Report:
    """Convert `source` into the other format.

    Raises:
        CheckpointError: the source cannot be used, is damaged, or the disk does not give back what was written.
        ConfigError: config.json asks for what no table has.
        FileExistsError: `target` exists and `overwrite` was not asked for.
        OSError: the target cannot be written. What was finished stays, and the same call goes on from there.
    """
    begun = time.monotonic()
    source, target = source.resolve(), target.resolve()
    _check_places(source, target, options)
    place = Workplace(target, _plan_digest(source, options))
    make_plan = _to_hugging_face if is_distributed(source) else _to_megatron
    with ExitStack() as opened:
        plan = make_plan(source, place.directory, options, opened)
        opened.enter_context(place)
        files = plan.target.files
        kept = len(place.done)
        _check_space(place, _bytes_to_write(plan, place))
        total = sum(plan.source.tensors[name].nbytes for file in files for name in file.tensors)
        for stage in ("converted", "verified"):
            options.started(stage, total)
        try:
            Stream(plan.source, plan.target, place, options.workers, options.progress, plan.recorded).run()
            digests = _digests(plan, place)
            _finish(plan, place, digests)
            place.complete()
        except CheckpointError as error:
            raise CheckpointError(f"{error}{_stays(place, 'the next call uses or replaces it')}") from error
        except OSError as error:
            free = shutil.disk_usage(target.parent).free
            raise OSError(
                f"{target} cannot be written: {error}; {free} bytes are free there{_stays(place, _MAKE_ROOM)}"
            ) from error
    seconds = time.monotonic() - begun
    return Report(len(digests), total, len(files), kept, seconds, combined_digest(digests))


def _check_places(source: Path, target: Path, options: Options) -> None:
    if not source.is_dir():
        raise CheckpointError(f"{source} is no directory")
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target} and the source {source} lie in each other; choose another target")
    if not target.exists():
        return
    if not options.overwrite:
        raise FileExistsError(f"{target} exists; choose another target, or pass --overwrite")
    known = (INDEX, "config.json", SINGLE, HF_INDEX)
    if not target.is_dir() or not any((target / name).exists() for name in known):
        raise CheckpointError(f"{target} is no checkpoint; --overwrite replaces nothing else")


def _plan_digest(source: Path, options: Options) -> str:
    """Of all that decides what the files of the target are."""
    told: list[Any] = [_PLAN_VERSION, options.shard_bytes]
    for directory in (source, options.like):
        if directory is not None:
            for path in sorted(path for path in directory.iterdir() if path.is_file()):
                told.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())


_BESIDE_TENSOR = 512
"""Bytes that a tensor takes in indexes, records of digests and the journal, at most; of DeepSeek-V3 they are 400."""
_SMALL_FILES = 8
"""The indexes and records themselves, and directories."""
_DISK_BLOCK = 4096


def _bytes_to_write(plan: _Plan, place: Workplace) -> int:
    """Of the files of tensors that are not there yet, and of all that makes them a checkpoint."""
    files = [file.nbytes for file in plan.target.files if file.name not in place.done]
    companions = [path.stat().st_size for path in plan.companions.iterdir() if is_companion(path)]
    blocks = len(files) + len(companions) + _SMALL_FILES
    return sum(files) + sum(companions) + _BESIDE_TENSOR * len(plan.source.tensors) + _DISK_BLOCK * blocks


def _check_space(place: Workplace, needed: int) -> None:
    free = shutil.disk_usage(place.directory).free
    if needed > free:
        raise OSError(
            f"{needed} bytes are to be written to {place.target.parent}, and {free} are free there"
            f"{_stays(place, _MAKE_ROOM)}"
        )


_MAKE_ROOM = "make room, and the same call goes on from it"


def _stays(place: Workplace, then: str) -> str:
    """The end of a message; a directory in which nothing was finished goes."""
    return f". What is done stays in {place.directory}: {then}" if place.done else ""


def _to_megatron(source: Path, workplace: Path, options: Options, opened: ExitStack) -> _Plan:
    if options.like is not None:
        raise CheckpointError("--like is for the way to Hugging Face; a Hugging Face source has everything")
    given = opened.enter_context(closing(HfSource(source)))
    for name, of in given.copies.items():
        digests = {digest_of(given, each, np.empty(BAND_BYTES, np.uint8)) for each in (name, of)}
        if len(digests) > 1:
            raise CheckpointError(f"{source}: {name} should repeat {of} (tied), but it differs")
    plan = blueprint(given.config, given.prediction)
    config = _plain(given.config)
    target = opened.enter_context(closing(DistTarget(workplace, config, plan, given.tensors, options.shard_bytes)))
    return _Plan(given, target, source, given.copies, {}, _most(given.tensors))


def _to_hugging_face(source: Path, workplace: Path, options: Options, opened: ExitStack) -> _Plan:
    manifest = _verified_manifest(source, options.workers)
    companions = options.like or source / COMPANIONS
    if not (companions / "config.json").exists():
        raise CheckpointError(
            f"{companions} has no config.json; pass --like HF_DIR, the Hugging Face checkpoint that the run started "
            "from"
        )
    config = _plain(read_config(companions))
    given = opened.enter_context(closing(DistSource(source, config)))
    record = _record(source)
    origins: dict[str, tuple[Source, str]] = {name: (given, name) for name in given.tensors}
    copies = {} if record is None else record.copies
    if options.like is not None:
        _check_identity(source, manifest, options.like)
        like = opened.enter_context(closing(HfSource(options.like)))
        copies = like.copies
        unused = family_of(config).unused_tensors(config)
        # what the trainer does not build is what it was
        origins |= {name: (like, name) for name in like.tensors if name in unused - given.tensors.keys()}
    origins |= {name: (given, of) for name, of in copies.items()}
    combined = Combined(origins)
    target = opened.enter_context(closing(HfTarget(workplace, combined.tensors, options.shard_bytes)))
    recorded = {} if record is None else record.tensors
    return _Plan(combined, target, companions, copies, recorded, _most(combined.tensors))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the same model without quantisation."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _most(tensors: Mapping[str, Stored]) -> torch.dtype:
    """The dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for stored in tensors.values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _verified_manifest(source: Path, workers: int) -> Manifest | None:
    """Every file has its digest, but those whose tensors have digests of their own, which are compared as they are
    read. A checkpoint of another program has no manifest, and is read without. Raises CheckpointError."""
    if not (source / manifests.MANIFEST).exists():
        if (source / COMPANIONS).exists() or (source / RECORD).exists():
            raise CheckpointError(f"{source} has lost its {manifests.MANIFEST}; convert it anew")
        return None
    try:
        manifest = manifests.read_manifest(source)
    except manifests.Damaged as error:
        raise CheckpointError(f"{source} is damaged: {error}") from error
    later = {name for name in manifest.files if RECORD in manifest.files and name.endswith(".distcp")}
    sizes = [_size_fault(source / name, manifest.files[name].bytes) for name in sorted(later)]
    now = {name: entry for name, entry in manifest.files.items() if name not in later}
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(partial(manifests.faults, source, now, parts=workers), range(workers))
        faults = [fault for part in (sizes, *parts) for fault in part if fault]
    if faults:
        raise CheckpointError(f"{source} is damaged: {manifests.described(faults)}; use a copy, or convert it anew")
    return manifest


def _size_fault(path: Path, wanted: int) -> str:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return "" if size == wanted else f"{path.name} has {size} bytes instead of {wanted}"


def _check_identity(source: Path, manifest: Manifest | None, like: Path) -> None:
    wanted = None if manifest is None else manifest.identity.get(manifests.CONFIG_IDENTITY)
    if wanted is not None and entry_of(like / "config.json").digest != wanted:
        raise CheckpointError(f"{source} was trained from another config.json than {like} has; pass its own checkpoint")


def _record(source: Path) -> Record | None:
    try:
        return msgspec.json.decode((source / RECORD).read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"cannot read {source / RECORD}: {error}") from error


def _digests(plan: _Plan, place: Workplace) -> dict[str, str]:
    """Of every tensor, once the keys are the source's. Raises CheckpointError."""
    found = {name: digest for done in place.done.values() for name, digest in done.tensors.items()}
    # Megatron holds a tensor that repeats another once
    found |= {name: found[of] for name, of in plan.copies.items() if name not in found}
    if differing := found.keys() ^ plan.source.tensors.keys():
        raise CheckpointError(f"source and target differ in {some_names(differing)}")
    return found


def _finish(plan: _Plan, place: Workplace, digests: Mapping[str, str]) -> None:
    """What makes it a checkpoint."""
    directory = place.directory
    plan.target.finish()
    found: HfSource | DistSource
    if not isinstance(plan.target, DistTarget):
        _write_companions(plan, directory)
        found = HfSource(directory)
    else:
        (directory / COMPANIONS).mkdir(exist_ok=True)
        _write_companions(plan, directory / COMPANIONS)
        record = Record(dict(digests), dict(plan.copies), combined_digest(digests))
        (directory / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        found = DistSource(directory, read_config(directory / COMPANIONS), plan.target.plan)
    found.close()
    copies = plan.copies.keys() if isinstance(plan.target, DistTarget) else set()
    if differing := (found.tensors.keys() | copies) ^ digests.keys():
        raise CheckpointError(f"{directory} and the source differ in {some_names(differing)}")
    done = {name: each.entry for name, each in place.done.items()}
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    small = [name for name in names if name not in done and name != JOURNAL]
    # a disk brings many at once to rest in the time of one
    with ThreadPoolExecutor(len(small)) as pool:
        list(pool.map(partial(flush, directory), small))
    if isinstance(plan.target, DistTarget):
        files = done | {name: entry_of(directory / name) for name in small}
        identity = {"digest of all tensors": combined_digest(digests)}
        write_manifest(directory, Manifest(0, 0, files, {}, identity))


def _write_companions(plan: _Plan, directory: Path) -> None:
    copy_companions(plan.companions, directory, plan.dtype)
    config = read_config(directory)
    if "quantization_config" in config:
        (directory / "config.json").write_text(json.dumps(_plain(config), indent=2) + "\n")
