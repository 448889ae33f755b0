"""What kind of failure ended a process, and whether the same again may succeed. Pure.

Flows in: exit codes and the end of a log. Flows out: a `FailureKind`.
Invariant: what cannot succeed is never tried again: bad input ends a run at once, an error that comes back before
anything was achieved ends it the second time.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

UNUSABLE_INPUT = 2
"""Exit code of every role whose spec, data or model cannot be used."""

OF_SIGNAL = 128
"""Above it by its number, a shell and a trainer rank (`training/termination.py`) tell which signal has ended them."""

_RANK_EXIT = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""In torchrun's account of the rank that failed first; the launcher itself ends with 1."""


class FailureKind(StrEnum):
    INFRASTRUCTURE = "infrastructure"
    """Killed from outside: memory, node, operator."""
    DATA = "data"
    """Spec, data or model cannot be used."""
    PROGRAM = "program"
    """An error of a role: of its own, or because something that it needs was gone."""


def kind_of_exit(code: int, log: str = "") -> FailureKind:
    """Args: `code`: negative for a signal, or above 128; `log`: of a launcher, which tells how its first rank ended."""
    told = _RANK_EXIT.search(log) if code > 0 else None
    code = int(told[1]) if told else code
    if code < 0 or code - OF_SIGNAL in signal.valid_signals():
        return FailureKind.INFRASTRUCTURE
    return FailureKind.DATA if code == UNUSABLE_INPUT else FailureKind.PROGRAM


@dataclass
class RestartBudget:
    """Of one thing that is started again where it failed. `allowed`: so many times in all."""

    allowed: int
    used: int = 0
    _achieved: float | None = None

    def refusal(self, kind: FailureKind, achieved: float, possible: Callable[[], str] = str) -> str | None:
        """Why it is not started again; None: it is, and that is counted.

        Args:
            achieved: grows with what was done (steps, requests); an error that comes before it grew is the same one.
            possible: asked last: what stands against a restart, empty for nothing.
        """
        if kind is FailureKind.DATA:
            return "its input cannot be used, and would not be the next time"
        if self.used >= self.allowed:
            return f"it was started again {self.used} of {self.allowed} times"
        if kind is FailureKind.PROGRAM and achieved <= (self._achieved or 0):
            return "nothing was achieved since it was started: the same would come again"
        if against := possible():
            return against
        self.used += 1
        self._achieved = achieved
        return None
