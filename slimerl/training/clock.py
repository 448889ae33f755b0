"""Where the time of a step goes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from slimerl.resilience import heartbeat
from slimerl.telemetry.phases import PhaseClock
from slimerl.training.phase_limits import BETWEEN


class Log(Protocol):
    """What the loop needs of `slimerl.telemetry.RunLog`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...
    def event(self, step: int, kind: str, name: str, text: str) -> None: ...
    def phase(self, step: int, name: str) -> AbstractContextManager[None]: ...


class SilentLog:
    """The log of every rank but the first."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def event(self, step: int, kind: str, name: str, text: str) -> None: ...

    def phase(self, step: int, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class StepClock:
    """`with clock(step, "train"): …` marks a phase in the log, adds up its seconds, and says by the heartbeat of this
    process that it is in it; `take` empties the clock."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._phases = PhaseClock()
        self._since = time.monotonic()

    @contextmanager
    def __call__(self, step: int, phase: str) -> Iterator[None]:
        heartbeat.enter(phase)
        with self._log.phase(step, phase), self._phases(phase, step):
            yield
        heartbeat.enter(BETWEEN)

    def take(self) -> dict[str, float]:
        """`time/…` per phase since the last call, and `time/step`, all in seconds."""
        now = time.monotonic()
        figures = {f"time/{phase}": seconds for phase, seconds in self._phases.take().items()}
        figures["time/step"] = now - self._since
        self._since = now
        return figures
