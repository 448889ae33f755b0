"""The weighted sum of rewards. The first part says whether a response is correct; the others shape the reward.

Invariants: all parts judge every response, at the same time; a part that failed makes the whole fail, or adds 0, as its
`on_failure` says (the first always makes it fail); a response that the first part cannot parse is unparsable, whatever
the others made of it.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slimerl.rewards.outcome import (
    UNPARSABLE_REWARD,
    Events,
    Failed,
    Outcome,
    RewardRequest,
    RunningReward,
    Scored,
    Unparsable,
)


@dataclass(frozen=True)
class Part:
    weight: float
    reward: RunningReward
    on_failure: Literal["drop", "zero"] = "drop"


@dataclass(frozen=True)
class WeightedSum:
    parts: Sequence[Part]
    _own: Events = field(default_factory=Events)

    async def start(self) -> None:
        """All at once. Raises what the first of them raises, after all have come to an end."""
        results = await asyncio.gather(*(part.reward.start() for part in self.parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        await asyncio.gather(*(part.reward.close() for part in self.parts))

    def take_events(self) -> Counter[str]:
        """Those of the parts, and `part_NUMBER_failed_REASON`, `part_NUMBER_unparsable`."""
        return sum((part.reward.take_events() for part in self.parts), self._own.take())

    async def score(self, request: RewardRequest) -> Outcome:
        outcomes = await asyncio.gather(*(part.reward.score(request) for part in self.parts))
        total = 0.0
        failed: Failed | None = None
        for number, (part, outcome) in enumerate(zip(self.parts, outcomes, strict=True)):
            match outcome:
                case Scored(reward=reward):
                    total += part.weight * reward
                case Unparsable():
                    self._own[f"part_{number}_unparsable"] += 1
                    total += part.weight * UNPARSABLE_REWARD
                case Failed(reason=reason, detail=detail):
                    self._own[f"part_{number}_failed_{reason}"] += 1
                    if part.on_failure == "drop" or number == 0:
                        failed = failed or Failed(reason, f"part {number}: {detail}")
        if failed is not None:
            return failed
        first = outcomes[0]
        return Scored(total, first.correct, first.verdict, first.said) if isinstance(first, Scored) else first
