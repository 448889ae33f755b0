"""Every wait has a deadline and a name."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class DeadlineExceeded(TimeoutError):
    """A named wait took longer than allowed."""


@dataclass(frozen=True)
class Deadline:
    """`Deadline("engine-0 to become healthy", 120)`: how long is left, and a clear error when nothing is."""

    what: str
    seconds: float
    _start: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._start + self.seconds - time.monotonic())

    def check(self, detail: str = "") -> None:
        """Raises DeadlineExceeded once the time is over; `detail` says what was last seen."""
        if self.remaining_s <= 0:
            seen = f" ({detail})" if detail else ""
            raise DeadlineExceeded(f"waited {self.seconds:g} s for {self.what}{seen}")

    def wait_until(self, ready: Callable[[], bool], poll_s: float = 0.1, detail: Callable[[], str] = str) -> None:
        """Poll `ready` until it is true. Raises DeadlineExceeded."""
        while not ready():
            self.check(detail())
            time.sleep(min(poll_s, self.remaining_s))

    async def wait_until_async(
        self, ready: Callable[[], bool], poll_s: float = 0.1, detail: Callable[[], str] = str
    ) -> None:
        """`wait_until` for the event loop."""
        while not ready():
            self.check(detail())
            await asyncio.sleep(min(poll_s, self.remaining_s))
