"""How evenly engines were loaded between two batches, how long they had nothing to do, and how much was moved.

Flows in: each slot as it is taken and given back. Flows out: `rollout/…` figures. Pure but for the clock.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class LoadFigures:
    """Looked at whenever a request ends, so that an engine that runs dry weighs as long as others work on."""

    clock: Callable[[], float] = time.monotonic
    _loads: Counter[str] = field(default_factory=Counter)
    """Requests in flight by engine."""
    _busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds with a request in flight, of each engine that was in service or had one."""
    _serving: Sequence[str] = ()
    """When it was last told."""
    _looked_s: float | None = None
    """Until when `_busy_s` is counted."""
    _told_s: float | None = None
    _spreads: float = 0.0
    _looks: int = 0
    _moves_told: int = 0
    _taken_back_told: int = 0

    def taken(self, engine_id: str) -> None:
        self._count_busy()
        self._loads[engine_id] += 1

    def given_back(self, engine_id: str, serving: Sequence[str]) -> None:
        """`serving`: engines in service."""
        self._serving = serving
        self._count_busy()
        loads = [self._loads[each] for each in serving]
        self._loads[engine_id] -= 1
        if not self._loads[engine_id]:
            del self._loads[engine_id]
        if sum(loads):
            self._spreads += max(loads) * len(loads) / sum(loads)
            self._looks += 1

    def take(self, moves: int, taken_back: int) -> dict[str, float]:
        """Since the last call. Args: counts since the start, of sessions that went on elsewhere, and of requests
        that were taken back from an engine's queue."""
        self._count_busy()
        figures = {
            "rollout/engine_idle_share": self._idle_share(),
            "rollout/engine_load_spread": self._spreads / self._looks if self._looks else 0.0,
            "rollout/migrations": float(moves - self._moves_told),
            "rollout/taken_back": float(taken_back - self._taken_back_told),
        }
        self._spreads, self._looks = 0.0, 0
        self._moves_told, self._taken_back_told = moves, taken_back
        return figures

    def _count_busy(self) -> None:
        """Up to now, by the loads as they are."""
        now = self.clock()
        since = now if self._looked_s is None else self._looked_s
        for engine_id in {*self._loads, *self._serving}:
            busy = now - since if self._loads[engine_id] else 0.0
            self._busy_s[engine_id] = self._busy_s.get(engine_id, 0.0) + busy
        self._looked_s = now
        self._told_s = now if self._told_s is None else self._told_s

    def _idle_share(self) -> float:
        """Of the engines' time since the last call, that in which they had no request: held, or with nothing to do."""
        all_s = ((self._looked_s or 0.0) - (self._told_s or 0.0)) * len(self._busy_s)
        idle = 1 - sum(self._busy_s.values()) / all_s if all_s else 0.0
        self._busy_s.clear()
        self._told_s = self._looked_s
        return idle
