"""Process lifetimes: a child never outlives its parent, and a tree is ended as a whole. Linux only."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence

import psutil

_PR_SET_PDEATHSIG = 1


class Orphaned(RuntimeError):
    """The parent was gone before this process could tie its life to it."""


def die_with_parent(parent_pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `with_signal` to this process when the parent's spawning thread ends.

    Raises:
        Orphaned: the parent ended before the call took effect.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, with_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise Orphaned(f"parent {parent_pid} ended before process {os.getpid()} had started")


def end_tree(pid: int, grace_s: float) -> list[int]:
    """SIGTERM a process and all its descendants, SIGKILL what is left after `grace_s`.

    Returns:
        Process ids that had to be killed.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return []
    tree = [*root.children(recursive=True), root]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    kill_all(alive)
    return [process.pid for process in alive]


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL those that still run (a reused process id is never hit) and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
