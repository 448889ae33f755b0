"""A circuit breaker: an endpoint that keeps failing gets one request at a time until it answers again. Pure.

Flows in: what became of each request, and the time. Flows out: whether one may be sent.
Invariant: while open, one probe at most is under way, and none before the cool-down is over.
"""

from dataclasses import dataclass

FAILURES = 8
"""In a row; fewer happen by chance when a busy endpoint sheds load."""
COOL_DOWN_S = 5.0


@dataclass
class Breaker:
    """Times are seconds of one monotonic clock."""

    failures_to_open: int = FAILURES
    cool_down_s: float = COOL_DOWN_S
    opened: int = 0
    """Times that it opened."""
    _failures: int = 0
    _probe_at: float | None = None
    """None while closed."""
    _probing: bool = False

    @property
    def is_open(self) -> bool:
        return self._probe_at is not None

    def admit(self, now: float) -> bool:
        """May a request be sent? If so, `succeeded`, `failed` or `abandoned` must follow. What is sent while open is a
        probe."""
        if self._probe_at is None:
            return True
        if self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True

    def wait_s(self, now: float) -> float | None:
        """Until `admit` is worth another call; None: until a probe's end is told."""
        if self._probe_at is None:
            return 0.0
        return None if self._probing else max(0.0, self._probe_at - now)

    def succeeded(self) -> None:
        self._failures, self._probe_at, self._probing = 0, None, False

    def failed(self, now: float, probe: bool) -> None:
        """While open only the probe counts: the others were sent before."""
        self._failures += 1
        if probe:
            self._probe_at, self._probing = now + self.cool_down_s, False
        elif self._probe_at is None and self._failures >= self.failures_to_open:
            self._probe_at, self.opened = now + self.cool_down_s, self.opened + 1

    def abandoned(self, probe: bool) -> None:
        """The request was cancelled: nothing was learnt."""
        if probe:
            self._probing = False
