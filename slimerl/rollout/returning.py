"""Engines that have ended and are being started again, or that a rollout role which took over has yet to hear of: what
waits for an engine waits for these, too. Pure but for the clock.

Flows in: reports of whoever starts engines. Flows out: whether an engine may yet come.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slimerl.resilience.deadline import Deadline


@dataclass
class ReturningEngines:
    """By engine id, each until its deadline."""

    _expected: dict[str, Deadline] = field(default_factory=dict)
    _outlived: dict[str, Deadline] = field(default_factory=dict)
    """Of these, those that need no start where they still run."""

    def lost(self, engine_id: str, returns_s: float) -> None:
        """Expect it to register again within `returns_s`; 0: no longer."""
        self.registered(engine_id)
        if returns_s > 0:
            self._expected[engine_id] = Deadline(f"{engine_id} to register again", returns_s)

    def outlived(self, engine_ids: Iterable[str], at_once_s: float, returns_s: float) -> None:
        """They were there when another process ended: those that still run register within `at_once_s`, the others as
        after `lost`."""
        for engine_id in engine_ids:
            self.lost(engine_id, returns_s)
            self._outlived[engine_id] = Deadline(f"{engine_id} to register with another rollout role", at_once_s)

    def registered(self, engine_id: str) -> None:
        self._expected.pop(engine_id, None)
        self._outlived.pop(engine_id, None)

    @property
    def at_once_s(self) -> float:
        """Until all that have outlived another process must have registered; 0: they have, or will not."""
        return max((deadline.remaining_s for deadline in self._outlived.values()), default=0.0)

    @property
    def remaining_s(self) -> float:
        """Until none is expected any more; 0: none is."""
        return max((deadline.remaining_s for deadline in self._expected.values()), default=0.0)

    def names(self) -> list[str]:
        return [engine_id for engine_id, deadline in self._expected.items() if deadline.remaining_s > 0]
