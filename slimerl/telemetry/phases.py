"""Seconds by name of phase: the one clock of whoever has phases. Each is a span of the process's trace, too."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from slimerl.telemetry import trace


class PhaseClock:
    """`with clock("send"): …`; a phase entered many times adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str, step: int | None = None) -> Iterator[None]:
        start = time.monotonic()
        try:
            with trace.span(phase, step):
                yield
        finally:
            self.seconds[phase] += time.monotonic() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken
