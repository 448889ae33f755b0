"""Where a role's threads stand, in its own log.

Flows in: processes of a role that is about to be killed. Flows out: the stacks of all their threads.
Invariant: a process that has no handler for the signal that asks for them is not asked: it would end by it.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.heartbeat import STACKS_SIGNAL

STACKS_S = 5.0
"""For a process to write its stacks; one that is stopped wakes up for it."""
SETTLED_S = 0.3
"""A log that has not grown for so long is complete."""


def show_stacks(role: str, role_log: Path, processes: Sequence[psutil.Process], why: str) -> None:
    """Each process of the role that can writes the stacks of its threads to its log, under a line that names it."""
    for process in processes:
        if not _catches(process.pid, STACKS_SIGNAL):
            continue
        log = _log_of(process.pid) or role_log
        append(log, f"\n{role} {why.partition(';')[0]}; threads of process {process.pid}:\n")
        size = log.stat().st_size
        try:
            process.send_signal(STACKS_SIGNAL)
            process.resume()  # a process that is stopped takes no signal before it goes on
            until_written(log, size)
        except (psutil.NoSuchProcess, DeadlineExceeded) as error:
            append(log, f"process {process.pid} has not shown them: {error}\n")


def until_written(log: Path, begun: int) -> None:
    """Args: `begun`: its size before they were asked for. Raises DeadlineExceeded."""
    deadline = Deadline("its stacks", STACKS_S)
    deadline.wait_until(lambda: log.stat().st_size > begun)
    size, since = log.stat().st_size, time.monotonic()
    while time.monotonic() < since + SETTLED_S and deadline.remaining_s:
        time.sleep(SETTLED_S / 5)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()


def append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def _catches(pid: int, number: int) -> bool:
    """Has the process a handler for the signal? Without one it would end it. See proc(5), SigCgt."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _log_of(pid: int) -> Path | None:
    """The file behind its standard error."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/fd/2"))
    except OSError:
        return None
    return path if path.is_file() else None
