"""Engines that have ended and are being started again: what waits for an engine waits for these, too. Pure but for the
clock.

Flows in: reports of whoever starts engines. Flows out: whether an engine may yet come.
"""

from dataclasses import dataclass, field

from slimerl.resilience.deadline import Deadline


@dataclass
class ReturningEngines:
    """By engine id, each until its deadline."""

    _expected: dict[str, Deadline] = field(default_factory=dict)

    def lost(self, engine_id: str, returns_s: float) -> None:
        """Expect it to register again within `returns_s`; 0: no longer."""
        self._expected.pop(engine_id, None)
        if returns_s > 0:
            self._expected[engine_id] = Deadline(f"{engine_id} to register again", returns_s)

    def registered(self, engine_id: str) -> None:
        self._expected.pop(engine_id, None)

    @property
    def remaining_s(self) -> float:
        """Until none is expected any more; 0: none is."""
        return max((deadline.remaining_s for deadline in self._expected.values()), default=0.0)

    def names(self) -> list[str]:
        return [engine_id for engine_id, deadline in self._expected.items() if deadline.remaining_s > 0]
