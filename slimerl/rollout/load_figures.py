"""How evenly engines were loaded between two batches, how long they had nothing to do, how much was moved, and why
requests were tried again.

Flows in: each slot as it is taken and given back, failed tries. Flows out: `rollout/…` figures. Pure but for the clock.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat


@dataclass
class LoadFigures:
    """Looked at whenever a request ends, so that an engine that runs dry weighs as long as others work on."""

    clock: Callable[[], float] = time.monotonic
    _loads: dict[str, int] = field(default_factory=dict)
    """Requests in flight, of each engine that has one."""
    _since_s: dict[str, float] = field(default_factory=dict)
    """Of the same engines: from when on their time is not in `_busy_s` yet."""
    _busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds with a request in flight, of each engine that was in service or had one."""
    _serving: Sequence[str] = ()
    """When it was last told."""
    _told_s: float | None = None
    _spreads: float = 0.0
    _looks: int = 0
    _moves_told: int = 0
    _taken_back_told: int = 0
    _tried_again: Counter[str] = field(default_factory=Counter)

    def taken(self, engine_id: str) -> None:
        load = self._loads.get(engine_id, 0)
        if not load:
            self._since_s[engine_id] = self._now()
        self._loads[engine_id] = load + 1

    def given_back(self, engine_id: str, serving: Sequence[str]) -> None:
        """`serving`: engines in service."""
        if serving != self._serving:
            self._note(self._serving)
            self._serving = serving
        loads = list(map(self._loads.get, serving, repeat(0)))
        if total := sum(loads):
            self._spreads += max(loads) * len(loads) / total
            self._looks += 1
        self._loads[engine_id] -= 1
        if not self._loads[engine_id]:
            del self._loads[engine_id]
            self._count(engine_id, self._now())
            del self._since_s[engine_id]

    def tried_again(self, reason: str) -> None:
        """A try failed, and another follows."""
        self._tried_again[reason] += 1

    def take(self, moves: int, taken_back: int) -> dict[str, float]:
        """Since the last call. Args: counts since the start, of sessions that went on elsewhere, and of requests
        that were taken back from an engine's queue."""
        figures = {
            "rollout/engine_idle_share": self._idle_share(self._now()),
            "rollout/engine_load_spread": self._spreads / self._looks if self._looks else 0.0,
            "rollout/migrations": float(moves - self._moves_told),
            "rollout/taken_back": float(taken_back - self._taken_back_told),
        }
        self._spreads, self._looks = 0.0, 0
        self._moves_told, self._taken_back_told = moves, taken_back
        figures |= {f"rollout/tried_again_{reason}": float(count) for reason, count in self._tried_again.items()}
        self._tried_again.clear()
        return figures

    def _now(self) -> float:
        now = self.clock()
        if self._told_s is None:
            self._told_s = now
        return now

    def _note(self, engines: Iterable[str]) -> None:
        """They count, with or without a request."""
        for engine_id in engines:
            self._busy_s.setdefault(engine_id, 0.0)

    def _count(self, engine_id: str, now: float) -> None:
        """The time up to now of an engine with a request."""
        self._busy_s[engine_id] = self._busy_s.get(engine_id, 0.0) + now - self._since_s[engine_id]
        self._since_s[engine_id] = now

    def _idle_share(self, now: float) -> float:
        """Of the engines' time since the last call, that in which they had no request: held, or with nothing to do."""
        self._note(self._serving)
        for engine_id in self._loads:
            self._count(engine_id, now)
        all_s = (now - (self._told_s or 0.0)) * len(self._busy_s)
        idle = 1 - sum(self._busy_s.values()) / all_s if all_s else 0.0
        self._busy_s.clear()
        self._told_s = now
        return idle
