"""Roles that run but stand still: noticed, made to show where they stand, and killed, for others to start them again.

Flows in: the processes of the roles, their heartbeats (`slimerl/resilience/heartbeat.py`). Flows out: the stacks of
all their threads in the role's own log, and a role that has ended.
Invariants: a role is killed only after its stacks were asked for; silence is counted by looks of this process and not
by the clock, so that a machine that was suspended, or is so busy that nobody runs, kills nobody.

A process stands still when its heartbeat's thread is silent, when it is stopped by a signal (both for
`deadlines.alive_s`), or when what it does has taken longer than that may (`deadlines.stall_s` without a sign of
progress, and the deadline of the phase). Who stops a role in order to debug it raises these. Of a role on other nodes
the heartbeats alone are seen.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slimerl.conductor.supervise import RoleProcess
from slimerl.resilience.heartbeat import Pulse, read_pulses

LOOK_S = 5.0
"""Between two looks; one costs some milliseconds for each role."""


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
            if why := next(self._standing(role, pulses, before, passed_s), None):
                role.show_stacks(why)
                role.kill_stalled(why)

    def _standing(
        self,
        role: RoleProcess,
        pulses: Sequence[Pulse],
        before: dict[tuple[str, int], _Silence],
        passed_s: float,
    ) -> Iterator[str]:
        """Why the role counts as standing still, in the order in which it is to be told."""
        silent: list[str] = []
        late: list[str] = []
        for process in role.processes():
            stopped = _is_stopped(process)
            if self._silent_s("stopped", process.pid, stopped, before, passed_s) >= self.alive_s and stopped:
                silent.append(f"process {process.pid} was stopped by a signal")
        for pulse in role.own(pulses):
            if self._silent_s(f"beat of {pulse.name}", pulse.pid, pulse.beat, before, passed_s) >= self.alive_s:
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


def _is_stopped(process: psutil.Process) -> bool:
    """By SIGSTOP or a terminal; not by a debugger, which has another state."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
