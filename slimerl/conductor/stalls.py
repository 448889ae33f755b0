"""Roles that run but stand still: noticed, made to show where they stand, and killed, for others to start them again.

Flows in: the processes of the roles, their heartbeats (`slimerl/resilience/heartbeat.py`). Flows out: the stacks of
all their threads in the role's own log, and a role that has ended.
Invariants: a role is killed only after its stacks were asked for; silence is counted by looks of this process and not
by the clock, so that a machine that was suspended, or is so busy that nobody runs, kills nobody.

A process stands still when its heartbeat's thread is silent, when it is stopped by a signal (both for
`deadlines.alive_s`), or when what it does has taken longer than that may (`deadlines.stall_s` without a sign of
progress, and the deadline of the phase). Who stops a role in order to debug it raises these.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slimerl.conductor.supervise import RoleProcess
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.heartbeat import STACKS_SIGNAL, Pulse, read_pulses

LOOK_S = 5.0
"""Between two looks; one costs some milliseconds for each role."""
STACKS_S = 5.0
"""For a process to write its stacks; one that is stopped wakes up for it."""
SETTLED_S = 0.3
"""A log that has not grown for so long is complete."""


@dataclass
class _Silence:
    """`mark`: what would change if the process lived."""

    mark: object = None
    seconds: float = 0.0

    def look(self, mark: object, passed_s: float) -> float:
        """How long the mark has been the same, in looks."""
        self.seconds = self.seconds + passed_s if mark == self.mark else 0.0
        self.mark = mark
        return self.seconds


@dataclass
class Stalls:
    """Of all roles of a run. `alive_s`: as in `DeadlineSpec`."""

    run_dir: Path
    alive_s: float
    look_s: float = LOOK_S
    _looked_s: float = field(default_factory=time.monotonic)
    _silences: dict[tuple[str, int], _Silence] = field(default_factory=dict)

    def end_stalled(self, roles: Sequence[RoleProcess]) -> None:
        """Look, if it is time to; kill the roles that stand still. What becomes of them is for others to say."""
        now = time.monotonic()
        if now < self._looked_s + self.look_s:
            return
        passed_s, self._looked_s = min(now - self._looked_s, 2 * self.look_s), now
        pulses = read_pulses(self.run_dir)
        before, self._silences = self._silences, {}
        for role in roles:
            if role.exit_code is not None:
                continue
            processes = role.processes()
            if why := next(self._standing(role, processes, pulses, before, passed_s), None):
                show_stacks(role, processes, why)
                role.kill_stalled(why)

    def _standing(
        self,
        role: RoleProcess,
        processes: Sequence[psutil.Process],
        pulses: Sequence[Pulse],
        before: dict[tuple[str, int], _Silence],
        passed_s: float,
    ) -> Iterator[str]:
        """Why the role counts as standing still, in the order in which it is to be told."""
        silent: list[str] = []
        late: list[str] = []
        own = {pulse.pid: pulse for pulse in pulses}
        for process in processes:
            stopped = _is_stopped(process)
            if self._silent_s("stopped", process.pid, stopped, before, passed_s) >= self.alive_s and stopped:
                silent.append(f"process {process.pid} was stopped by a signal")
            if (pulse := own.get(process.pid)) is None:
                continue
            if self._silent_s("beat", process.pid, pulse.beat, before, passed_s) >= self.alive_s:
                silent.append(f"{pulse.name} (process {pulse.pid}) gave no sign of life in '{pulse.phase}'")
            elif pulse.late_s > 0:
                late.append(f"{pulse.name} (process {pulse.pid}) does not get on in '{pulse.phase}'")
        if silent or late:
            yield f"stood still: {'; '.join(silent or late)}; where its threads stood is in {role.log_path}"

    def _silent_s(
        self, kind: str, pid: int, mark: object, before: dict[tuple[str, int], _Silence], passed_s: float
    ) -> float:
        silence = self._silences[kind, pid] = before.get((kind, pid), _Silence())
        return silence.look(mark, passed_s)


def show_stacks(role: RoleProcess, processes: Sequence[psutil.Process], why: str) -> None:
    """Each process of the role that can writes the stacks of its threads to its log, under a line that names it."""
    for process in processes:
        if not _catches(process.pid, STACKS_SIGNAL):
            continue
        log = _log_of(process.pid) or role.log_path
        _append(log, f"\n{role.role.name} {why.partition(';')[0]}; threads of process {process.pid}:\n")
        try:
            process.send_signal(STACKS_SIGNAL)
            process.resume()  # a process that is stopped takes no signal before it goes on
            _until_written(log)
        except (psutil.NoSuchProcess, DeadlineExceeded) as error:
            _append(log, f"process {process.pid} has not shown them: {error}\n")


def _until_written(log: Path) -> None:
    """Raises DeadlineExceeded."""
    begun, deadline = log.stat().st_size, Deadline("its stacks", STACKS_S)
    deadline.wait_until(lambda: log.stat().st_size > begun)
    size, since = log.stat().st_size, time.monotonic()
    while time.monotonic() < since + SETTLED_S and deadline.remaining_s:
        time.sleep(SETTLED_S / 5)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()


def _append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def _is_stopped(process: psutil.Process) -> bool:
    """By SIGSTOP or a terminal; not by a debugger, which has another state."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


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
