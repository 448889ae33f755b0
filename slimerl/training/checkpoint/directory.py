"""The directory of a run's checkpoints: names, manifests, verification, choice, removal. Pure files, no Megatron.

    checkpoints/step-20/            complete: `manifest.json` lists every file with its size and digest
    checkpoints/step-30.partial/    being written, or left by a process that was killed while it wrote
    checkpoints/step-10.damaged/    was complete once and did not stand verification; kept to be looked at

Invariant: `step-N` comes to be by a rename after everything in it is on the disk. A file is what the manifest says or
the checkpoint is not used; the manifest carries a digest of itself.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

CHECKPOINTS_DIR = "checkpoints"
"""In the run directory."""
MANIFEST = "manifest.json"
CONFIG_IDENTITY = "digest of model.path's config.json"
"""In `Manifest.identity` of a run's checkpoint."""
COMPANIONS = "hf"
"""In a converted checkpoint: config.json and tokenizer of the model."""
PARTIAL = ".partial"
DAMAGED = ".damaged"
STOP_FILE = "stop"
"""In the run directory: asks for a checkpoint at the end of the step, and for the end of the run (`slimerl stop`)."""
_COMPLETE = re.compile(r"step-(0|[1-9][0-9]*)")
"""As `complete_path` writes it: another spelling of a number would name a directory that is not there."""
_CHUNK_BYTES = 1 << 20
_NAMED = 5
"""Faults that a message lists at most."""


class Entry(msgspec.Struct, frozen=True):
    """A file as it was written. `digest`: XXH3, 128 bits, hexadecimal."""

    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of, and what it is of."""

    step: int
    version: int
    """Policy version of the weights."""
    files: dict[str, Entry]
    layout: dict[str, Any]
    """`training.parallel` of the run that wrote it."""
    identity: dict[str, Any]
    """Keys of the spec that must not change when a run goes on."""


class _Signed(msgspec.Struct, frozen=True):
    manifest: Manifest
    digest: str


def complete_path(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def partial_path(root: Path, step: int) -> Path:
    return root / f"step-{step}{PARTIAL}"


def complete_steps(root: Path) -> list[int]:
    """Steps with a checkpoint that claims to be complete, newest first."""
    if not root.is_dir():
        return []
    found = [_COMPLETE.fullmatch(path.name) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def partial_names(root: Path) -> list[str]:
    """What was left by writers that did not come to an end."""
    return sorted(path.name for path in root.glob(f"step-*{PARTIAL}")) if root.is_dir() else []


def unusable_names(root: Path) -> list[str]:
    """What may hold a run's work but is never chosen: set aside as damaged, a link that leads nowhere, another name."""
    if not root.is_dir():
        return []
    chosen = {complete_path(root, step).name for step in complete_steps(root)}
    return sorted({path.name for path in root.glob("step-*")} - chosen - set(partial_names(root)))


def entry_of(path: Path) -> Entry:
    """Size and digest of a file, read back from the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return Entry(file.tell(), digest.hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write and flush it."""
    signed = _Signed(manifest, _digest(manifest))
    write_flushed(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(signed)) + b"\n")


def read_manifest(directory: Path) -> Manifest:
    """Raises Damaged: there is none, or it is not what was written."""
    try:
        signed = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Signed)
    except OSError as error:
        raise Damaged(f"{MANIFEST}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    if _digest(signed.manifest) != signed.digest:
        raise Damaged(f"{MANIFEST} does not match its own digest")
    return signed.manifest


class Damaged(Exception):
    """A checkpoint is not what was written; the message says what of it."""


def faults(directory: Path, files: Mapping[str, Entry], part: int = 0, parts: int = 1) -> list[str]:
    """What of a checkpoint is not as its manifest says; empty: all of it is.

    Args:
        part, parts: look at every `parts`-th file alone, from `part` on (each rank verifies a share).
    """
    return [fault for name in sorted(files)[part::parts] if (fault := _fault(directory / name, files[name], name))]


def _fault(path: Path, entry: Entry, name: str) -> str:
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
        return "" if entry_of(path) == entry else f"the content of {name} has changed (digest)"
    except OSError as error:
        return f"{name}: {error.strerror}"


def described(found: Sequence[str]) -> str:
    """Faults on one line."""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more


def start_partial(root: Path, step: int) -> Path:
    """An empty directory to write into; what earlier writes left goes. Raises OSError."""
    for name in partial_names(root):
        shutil.rmtree(root / name, ignore_errors=True)
    partial = partial_path(root, step)
    partial.mkdir(parents=True)
    return partial


def complete(root: Path, step: int) -> Path:
    """Give a checkpoint its name: from now on it counts.

    Raises:
        OSError: it does not count then; among others where one of that step is there, which may be sound: a run that
            goes on from an older one has set aside what it found damaged.
    """
    partial, final = partial_path(root, step), complete_path(root, step)
    flush_directory(partial)
    if final.exists():
        raise FileExistsError(f"{final} is there already and stays; does another run write to this output_dir?")
    partial.rename(final)
    flush_directory(root)
    return final


def remove_partial(root: Path, step: int) -> None:
    """Give the disk space of a failed write back, as far as that can be done now."""
    shutil.rmtree(partial_path(root, step), ignore_errors=True)


def set_aside(root: Path, step: int) -> Path:
    """Take a damaged checkpoint out of the choice; it stays to be looked at, in the place of an earlier one."""
    aside = root / f"step-{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    complete_path(root, step).rename(aside)
    return aside


def remove_older(root: Path, newest: int, keep_last: int) -> list[int]:
    """Remove all but the newest `keep_last` checkpoints, if `newest` is complete; returns the steps removed.

    Only sizes are looked at: `newest` was digested as it was read back from the disk.
    """
    directory = complete_path(root, newest)
    sizes = {name: entry.bytes for name, entry in read_manifest(directory).files.items()}
    wrong = [name for name, size in sizes.items() if (directory / name).stat().st_size != size]
    if wrong:
        raise Damaged(f"{directory}: {described(wrong)} changed while it was being completed")
    removed = [step for step in complete_steps(root) if step <= newest][keep_last:]
    for step in removed:
        shutil.rmtree(complete_path(root, step))
    return removed


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk. Raises OSError."""
    try:
        with path.open("wb") as file:
            file.write(data)
            flush(file)
    except OSError as error:
        # that of a full disk does not say which file it was
        error.filename = str(path)
        raise


def flush(file: BinaryIO) -> None:
    """Wait until what was written is on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Names of files survive a power cut from here on."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(manifest, order="sorted"))
