"""Requests that wait inside a crowded engine are taken back while others run dry: the tail of a rollout.

Flows in: requests as they are sent and as they end. Flows out: aborts, where the router advises a move (`kv_tail`).
What was taken back ends at its engine with what it has, which is nothing if it waited, and is sent to another. One that
runs is left alone until its chunk ends: the router weighs then where it goes on.

Invariants: only a request whose sender goes on from an aborted answer is taken back; no further
advice is asked for until they have left, since it would count them still; an engine that turns out to
run what was taken for waiting is believed to run everything until new weights come.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from slimerl.engine.client import EngineError
from slimerl.engine.protocol import Generation
from slimerl.rollout.engines import Engines
from slimerl.rollout.router import Reservation, Router

logger = logging.getLogger(__name__)

ADVICE_S = 0.1
ABORT_S = 5.0
"""For an engine to accept an abort."""


class Asked(msgspec.Struct, eq=False):
    """A request that an engine has. `name`: as the engine knows it."""

    name: str
    divisible: bool
    taken_back: bool = False


@dataclass
class Migration:
    """See the module's docstring."""

    router: Router
    engines: Engines
    allowed: Callable[[], bool] = lambda: True
    """Does none wait outside the engines?"""
    moved: int = 0
    """Requests taken back since the start."""
    _asked: dict[int, Asked] = field(default_factory=dict)
    """By the number of their reservation."""
    _divisible: int = 0
    """So many of these are."""
    _leaving: set[int] = field(default_factory=set)
    """Of these, those that were taken back."""
    _aborts: "set[asyncio.Task[None]]" = field(default_factory=set)
    _advised_s: float = -math.inf
    _planned: asyncio.TimerHandle | None = None
    _runs_all: dict[str, int] = field(default_factory=dict)
    """Engine → version for which it is believed to let nothing wait."""

    def sent(self, slot: Reservation, name: str, divisible: bool) -> Asked:
        asked = self._asked[slot.number] = Asked(name, divisible)
        self._divisible += divisible
        return asked

    def ended(self, slot: Reservation) -> None:
        self._divisible -= self._asked.pop(slot.number).divisible
        self._leaving.discard(slot.number)

    def waited(self, slot: Reservation, asked: Asked, generation: Generation) -> bool:
        """Was it taken back before it had a token?"""
        if not asked.taken_back or generation.finish_reason != "abort":
            return False
        if generation.tokens:
            self._runs_all[slot.engine_id] = self.router.version
        return not generation.tokens

    def even_out_soon(self) -> None:
        """To be called when a request has ended. However many end, advice is taken now and then: it looks at every
        request. Nothing is asked where none could be taken back."""
        if self._planned is not None or not self._divisible:
            return
        loop = asyncio.get_running_loop()
        if (wait_s := self._advised_s + ADVICE_S - loop.time()) > 0:
            self._planned = loop.call_later(wait_s, self.even_out)
        else:
            self.even_out()

    def even_out(self) -> None:
        """Take back what the router advises to move."""
        self._planned = None
        if self._leaving or not self.allowed() or not self._divisible:
            return
        self._advised_s = asyncio.get_running_loop().time()
        for move in self.router.tail_moves(running_too=False):
            asked = self._asked.get(move.number)
            if asked is None or not asked.divisible or self._runs_all.get(move.source) == self.router.version:
                continue
            asked.taken_back = True
            self._leaving.add(move.number)
            self.moved += 1
            task = asyncio.get_running_loop().create_task(self._take_back(move.source, asked.name))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
        for task in self._aborts:
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)

    async def _take_back(self, engine_id: str, name: str) -> None:
        try:
            await self.engines[engine_id].abort(name, timeout_s=ABORT_S)
        except EngineError as error:
            logger.warning("%s is not taken back, and stays on %s: %s", name, engine_id, error)
