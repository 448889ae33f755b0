"""Requests that engines have: each ends at once where its engine is lost.

Flows in: requests, as what their callers await; engines that are taken out of service. Flows out: answers, or that the
engine was lost. A request needs no task of its own for it: its caller's is cancelled, and that is taken back.
Invariant: a caller that somebody else cancels is cancelled, also in the moment in which its engine is lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from slimerl.engine.protocol import Generation
from slimerl.rollout.tries import TryFailed

LOST = "engine_lost"
"""Reason of a try whose engine was taken out of service meanwhile."""


@dataclass
class UnderWay:
    """See the module's docstring."""

    _callers: dict[str, "set[asyncio.Task[Any]]"] = field(default_factory=lambda: defaultdict(set))
    """By engine."""
    _interrupted: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Of these, those that do not know it yet."""

    async def unless_lost(self, engine_id: str, asking: Coroutine[Any, Any, Generation]) -> Generation:
        """Raises TryFailed: the engine was lost."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are made by tasks")
        before = task.cancelling()
        self._callers[engine_id].add(task)
        try:
            return await asking
        except asyncio.CancelledError:
            if task not in self._interrupted or task.uncancel() > before:
                raise
            detail = f"engine {engine_id} was taken out of service meanwhile"
            raise TryFailed(LOST, detail, again=True, suspect=False) from None
        finally:
            self._callers[engine_id].discard(task)
            self._interrupted.discard(task)

    def interrupt(self, engine_id: str) -> None:
        """The engine will not go on with what it has."""
        for task in self._callers[engine_id] - self._interrupted:
            self._interrupted.add(task)
            task.cancel()
