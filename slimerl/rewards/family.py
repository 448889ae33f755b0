"""Kill a process with every descendant, also those that left its session or multiply while they are hunted. Linux."""

import contextlib
import os
import signal

import psutil

_ROUNDS = 50
"""A frozen process forks no more, so that the hunt ends as soon as a round finds nobody new."""


def kill_family(pid: int) -> int:
    """SIGKILL `pid` and its descendants; those of a subreaper include its children's orphans.

    Returns:
        How many processes were killed.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return 0
    family: dict[int, psutil.Process] = {}
    for _ in range(_ROUNDS):
        new = [process for process in _with_descendants(root) if process.pid not in family]
        if not new:
            break
        for process in new:
            family[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
    # The root last: while it lives, orphans in its care can be found.
    for process in reversed(family.values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # Whatever the rounds did not catch of its own process group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    return len(family)


def _with_descendants(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
