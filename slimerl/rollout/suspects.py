"""Engines on which requests fail: are they to be waited for, or taken for dead?

Flows in: what came of the requests of each engine. Flows out: a moment's patience with the only engine; engines that
leave the router.
Invariants: an engine is taken for dead only when it does not say that it is healthy; one that is replaced meanwhile is
not its predecessor; one that did not answer in the time it was given is given none again until it has.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.engines import Engines
from slimerl.rollout.router import Router
from slimerl.samples.messages import EngineState

logger = logging.getLogger(__name__)

SUSPECT_AFTER = 3
"""Failures in a row after which an engine is asked whether it is healthy."""
PROBE_S = 5.0
PROBE_PAUSE_S = 0.2


@dataclass
class Suspects:
    """Of all engines of a dispatcher. `left`: told which has left the router."""

    router: Router
    engines: Engines
    left: Callable[[str], None]
    probes: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)
    """Per engine, since it last answered well."""
    _silent: set[str] = field(default_factory=set)
    """Engines that were given time to answer again, and did not; they are given none until they have answered."""

    def answered(self, engine_id: str) -> None:
        """It has answered well."""
        self._failures.pop(engine_id, None)
        self._silent.discard(engine_id)

    def failed(self, engine_id: str) -> None:
        """By its own fault, as it seems."""
        self._failures[engine_id] += 1
        if self._failures[engine_id] >= SUSPECT_AFTER and engine_id not in self.probes:
            task = asyncio.get_running_loop().create_task(self._probe(engine_id))
            self.probes[engine_id] = task
            task.add_done_callback(lambda _: self.probes.pop(engine_id, None))

    async def given_time(self, engine_id: str) -> None:
        """The only engine: until it answers again or, cancelled, whoever watches it says that it ended."""
        others = (one for one in self.router.engines() if one.engine_id != engine_id)
        if engine_id in self._silent or any(one.state is EngineState.SERVING for one in others):
            return
        deadline = Deadline(f"engine {engine_id} to answer again", PROBE_S)
        while deadline.remaining_s and not await self.engines[engine_id].healthy(timeout_s=deadline.remaining_s):
            await asyncio.sleep(min(PROBE_PAUSE_S, deadline.remaining_s))
        if not deadline.remaining_s:
            self._silent.add(engine_id)

    async def close(self) -> None:
        for probe in self.probes.values():
            probe.cancel()
        await asyncio.gather(*self.probes.values(), return_exceptions=True)

    async def _probe(self, engine_id: str) -> None:
        info = self.router.engine(engine_id)
        healthy = await self.engines[engine_id].healthy(timeout_s=PROBE_S)
        failures = self._failures.pop(engine_id, 0)
        joined_again = self.router.engine(engine_id).url != info.url
        if healthy or joined_again or self.router.engine(engine_id).state is EngineState.DEAD:
            return
        reason = f"{failures} requests in a row failed, and it does not answer as healthy"
        logger.error("engine %s is taken for dead: %s", engine_id, reason)
        self.router.leave(engine_id, reason)
        self.left(engine_id)
