"""Role processes: start with a log of their own, notice their end, say why, end them together."""

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.stacks import show_stacks
from slimerl.resilience.failure_kinds import kind_of_exit
from slimerl.resilience.heartbeat import Pulse
from slimerl.resilience.processes import kill_all
from slimerl.resilience.tied import tied_command

TAIL_LINES = 25
_LAUNCHER_ACCOUNT = re.compile(r"^[EWI]\d{4} .*torch/distributed/elastic/.*failed \(exitcode", re.MULTILINE)

HELPER_GRACE_S = 3.0
"""For processes of a role whose main process has ended."""


class RoleFailed(RuntimeError):
    """A role ended although the run was not over; the message names it and ends with the tail of its log."""

    def __init__(self, name: str, exit_code: int, log_path: Path, log_start: int = 0, stall: str = "") -> None:
        """Args: `log_start`: where the log of this start of the role begins; `stall`: why it was killed, if it was
        because it stood still."""
        log = text_from(log_path, log_start)
        self.name, self.kind = name, kind_of_exit(exit_code, log)
        self.summary = f"{name} {stall or describe_exit(exit_code)}"
        self._end_of_log = f"; the end of {log_path}:\n{last_lines(without_launcher(log))}"
        super().__init__(self.summary + self._end_of_log)

    def because(self, why_final: str) -> "RoleFailed":
        """The same, with the reason why nothing was started again."""
        self.args = (f"{self.summary}; {why_final}{self._end_of_log}",)
        return self

    def noting(self, what: str) -> "RoleFailed":
        """The same, with what is to be said of it wherever it is named."""
        self.summary = f"{self.summary} ({what})"
        self.args = (self.summary + self._end_of_log,)
        return self


class RoleProcess:
    """One running role. It is in a session of its own (Ctrl-C reaches the conductor alone) and dies with it."""

    def __init__(self, role: RoleCommand, log_dir: Path) -> None:
        self.role = role
        self._seen: list[psutil.Process] = []
        self._stall = ""
        self.log_path = log_dir / f"{role.name}.log"
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                tied_command(role.command),
                env=role.environment or None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while running."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """SIGTERM, if it still runs."""
        if self._process.poll() is None:
            # Afterwards they can no longer be found by their parent.
            self._seen = self._descendants()
            self._process.send_signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Ask the role to end, kill it after `grace_s`, reap it, and leave nothing of its tree."""
        descendants = self._seen or self._descendants()
        self.ask_to_end()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            descendants += self._descendants()
            self._process.kill()
            self._process.wait()
        # Helpers of the role (they clean up after it) end by themselves a moment later.
        _, alive = psutil.wait_procs(descendants, timeout=HELPER_GRACE_S)
        kill_all(alive)

    def processes(self) -> list[psutil.Process]:
        """Those that live: the role's own, and what it has started."""
        try:
            return [psutil.Process(self.pid), *self._descendants()]
        except psutil.NoSuchProcess:
            return []

    def own(self, pulses: Sequence[Pulse]) -> list[Pulse]:
        """Those of its processes."""
        pids = {process.pid for process in self.processes()}
        return [pulse for pulse in pulses if pulse.pid in pids]

    def show_stacks(self, why: str) -> None:
        """Each of its processes that can writes where its threads stand to its log. `why`: it is about to be killed."""
        show_stacks(self.role.name, self.log_path, self.processes(), why)

    def kill_stalled(self, why: str) -> None:
        """It stands still and would not heed a request: kill it, reap it, and leave nothing of its tree."""
        self._stall = why
        self._seen = self._descendants()
        self._process.kill()
        self.end(0.0)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def failure(self) -> RoleFailed:
        return RoleFailed(self.role.name, self.exit_code or 0, self.log_path, self._log_start, self._stall)


def watch(roles: Sequence[RoleProcess]) -> bool:
    """One look at all roles: True once the leading role has ended well.

    Raises:
        RoleFailed: another role ended, or the leading one with an error. When several ended together, the one
            named is the first in `roles` that did not end because another was gone.
    """
    ended = [role for role in roles if role.exit_code is not None]
    if not ended:
        return False
    if any(role.role.leads and role.exit_code == 0 for role in ended):
        return True
    killed = [role for role in ended if (role.exit_code or 0) < 0]
    raise (killed or [role for role in ended if not role.role.leads] or ended)[0].failure()


def end_all(roles: Sequence[RoleProcess], grace_s: float) -> None:
    """Ask every role to end at once, then see each one gone."""
    for role in roles:
        role.ask_to_end()
    until = time.monotonic() + grace_s
    for role in roles:
        role.end(max(0.1, until - time.monotonic()))


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended early with exit code {code}" if code else "ended before the run was over"


def text_from(path: Path, start: int) -> str:
    """A text file from byte `start` on; what cannot be decoded is replaced."""
    return path.read_bytes()[start:].decode(errors="replace")


def without_launcher(log: str) -> str:
    """What the ranks of torchrun wrote: its own account of their end, longer than any message, comes last."""
    account = _LAUNCHER_ACCOUNT.search(log)
    return log[: account.start()].rstrip() or log if account else log


def last_lines(text: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(text.splitlines()[-lines:])
