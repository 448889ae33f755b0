"""A file system of its own for the checkpoints of a run under fire, which can be full while the disk below is not.

Flows in: the directory of a run, before it starts. Flows out: its `checkpoints/`, where a tmpfs is mounted.
Invariant: when it is unmounted, what was on it lies in its place, so that the run can go on there.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slimerl.conductor.run_directory import LOCK
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR

ROOMY = "50%"
"""Of the machine's memory; what is not used takes none."""


class CannotMount(Exception):
    """Says why."""


def refusal(out: Path) -> str:
    """Why nothing can be mounted below OUT; empty: it can."""
    probe = next(each for each in (out, *out.absolute().parents) if each.is_dir()) / f".chaos-mount-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        return str(error)
    try:
        _mount(probe)
        unmount(probe)
    except CannotMount as error:
        return str(error)
    finally:
        probe.rmdir()
    return ""


@contextmanager
def disk_of_checkpoints(run_dir: Path) -> Iterator[None]:
    """Raises CannotMount. One that a call has left which was killed is used as it is."""
    disk, kept = run_dir / CHECKPOINTS_DIR, run_dir / f"{CHECKPOINTS_DIR}.kept"
    if kept.exists() or not disk.is_mount():
        unmount(disk)
        disk.mkdir(parents=True, exist_ok=True)
        # without it a run takes what lies here for somebody else's
        (run_dir / LOCK).touch()
        if not kept.exists():
            disk.rename(kept)
        disk.mkdir(exist_ok=True)
        _mount(disk)
        shutil.copytree(kept, disk, dirs_exist_ok=True)
        shutil.rmtree(kept)
    try:
        yield
    finally:
        try:
            part = run_dir / f"{CHECKPOINTS_DIR}.part"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(disk, part)
            part.rename(kept)
        finally:
            unmount(disk)
        disk.rmdir()
        kept.rename(disk)


def unmount(disk: Path) -> None:
    """Where something is mounted there; whoever still has a file of it open keeps that. Raises CannotMount."""
    if disk.is_mount():
        _told(["umount", "--lazy", str(disk)])


def fill(disk: Path) -> None:
    """Leave no byte free, unless something is written at the same moment."""
    state = os.statvfs(disk)
    if state.f_bfree:
        with suppress(CannotMount):
            _resize(disk, str((state.f_blocks - state.f_bfree) * state.f_frsize))


def give_back(disk: Path) -> None:
    """Raises CannotMount."""
    _resize(disk, ROOMY)


def _mount(disk: Path) -> None:
    _told(["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", str(disk)])


def _resize(disk: Path, size: str) -> None:
    _told(["mount", "-o", f"remount,size={size}", str(disk)])


def _told(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMount(f"{command[0]}: {error}") from None
    if done.returncode:
        raise CannotMount(" ".join(done.stderr.split()) or f"{command[0]} ended with exit code {done.returncode}")
