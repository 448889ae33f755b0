"""How evenly engines were loaded between two batches, and how much was moved to make them so.

Flows in: each slot as it is taken and given back. Flows out: `rollout/…` figures. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class LoadFigures:
    """Looked at whenever a request ends, so that an engine that runs dry weighs as long as others work on."""

    _loads: Counter[str] = field(default_factory=Counter)
    """Requests in flight by engine."""
    _spreads: float = 0.0
    _looks: int = 0
    _moves_told: int = 0
    _taken_back_told: int = 0

    def taken(self, engine_id: str) -> None:
        self._loads[engine_id] += 1

    def given_back(self, engine_id: str, serving: Sequence[str]) -> None:
        """`serving`: engines in service."""
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
        figures = {
            "rollout/engine_load_spread": self._spreads / self._looks if self._looks else 0.0,
            "rollout/migrations": float(moves - self._moves_told),
            "rollout/taken_back": float(taken_back - self._taken_back_told),
        }
        self._spreads, self._looks = 0.0, 0
        self._moves_told, self._taken_back_told = moves, taken_back
        return figures
