"""A role that is a step of a job: its process here is the srun that started it, those of the role are on other nodes.

Flows in: `RoleCommand`s of a job. Flows out: what `RoleProcess` gives of a process of this machine.
Invariant: a step that was ended has no process left on any node.
"""

import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.stacks import append, until_written
from slimerl.conductor.supervise import RoleFailed, RoleProcess, text_from
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.resilience.failure_kinds import OF_SIGNAL
from slimerl.resilience.heartbeat import HEARTBEATS_DIR, STACKS_SIGNAL, Pulse

_ASK_S = 10.0
"""For a command of SLURM to answer."""
_KILL_S = 15.0
"""For srun to see all tasks ended that it has killed."""
_SIGNALS = range(1, 32)
"""srun ends with the highest exit code of its tasks; a signal counts as its number and `OF_SIGNAL`."""
_FIRST = re.compile(r"^srun: error: (\S+: tasks? \S+: .+)$", re.MULTILINE)
"""What it says of the task that it ends the others for."""


class StepProcess(RoleProcess):
    """One running step."""

    def __init__(self, role: RoleCommand, log_dir: Path) -> None:
        # those of the step before it in this place: nobody writes there until this one has come so far
        for path in (log_dir.parent / HEARTBEATS_DIR).glob("*"):
            if role.has_heartbeat(path.name):
                path.unlink(missing_ok=True)
        super().__init__(role, log_dir)
        self._asked = False

    @property
    def exit_code(self) -> int | None:
        code = super().exit_code
        return OF_SIGNAL - code if code is not None and code - OF_SIGNAL in _SIGNALS else code

    def ask_to_end(self) -> None:
        """SIGTERM for its tasks, once; srun itself would answer one with SIGKILL for them."""
        if self.exit_code is None and not self._asked:
            self._asked = True
            if not self._signal_tasks(signal.SIGTERM):
                self._process.terminate()

    def end(self, grace_s: float) -> None:
        self.ask_to_end()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._kill()

    def processes(self) -> list[psutil.Process]:
        """None here."""
        return []

    def own(self, pulses: Sequence[Pulse]) -> list[Pulse]:
        """By their names: on several nodes two processes may have the same number."""
        return [pulse for pulse in pulses if self.role.has_heartbeat(pulse.name)]

    def show_stacks(self, why: str) -> None:
        """All its processes get the signal; one that has no handler ends by it, and would a moment later. What is
        stopped takes none before it goes on."""
        append(self.log_path, f"\n{self.role.name} {why.partition(';')[0]}; threads of its processes:\n")
        size = self.log_path.stat().st_size
        self._signal_tasks(STACKS_SIGNAL, signal.SIGCONT)
        try:
            until_written(self.log_path, size)
        except DeadlineExceeded as error:
            append(self.log_path, f"{self.role.name} has not shown them: {error}\n")

    def failure(self) -> RoleFailed:
        """With the task that ended first, and its node: the others are ended with it."""
        failure = super().failure()
        first = _FIRST.search(text_from(self.log_path, self._log_start))
        return failure.noting(first[1]) if first and not self._stall else failure

    def kill_stalled(self, why: str) -> None:
        self._stall = why
        self._kill()

    def _kill(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._signal_tasks(signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def _signal_tasks(self, *signals: signal.Signals) -> bool:
        """Returns whether there are any yet."""
        shown = _told("squeue", "--noheader", "--steps", f"--jobs={self.role.job}", "--format=%i %j").splitlines()
        steps = [step for step, _, of in (line.partition(" ") for line in shown) if of.strip() == self.role.name]
        for each in signals if steps else ():
            _told("scancel", f"--signal={int(each)}", *steps)
        return bool(steps)


def start_role(role: RoleCommand, log_dir: Path) -> RoleProcess:
    """On this machine, or in the job that its command names."""
    return StepProcess(role, log_dir) if role.job else RoleProcess(role, log_dir)


def _told(*command: str) -> str:
    """What a command of SLURM prints; nothing where it fails: the job may be ending."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
