"""Environments as the event loop has them: episodes that wait are advanced together.

Flows in: `Advance`s, many at once. Flows out: an `Advanced` for each, or `Failed`.
Invariants: an episode stays with one worker; a call has at most `most` episodes; where one call for many fails, each of
them is asked for alone, so that an episode fails by its own fault alone.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from slimerl.environments.episode_worker import Advance, Advanced
from slimerl.rewards.outcome import Failed
from slimerl.rewards.pool import WorkerPool
from slimerl.spec.agent import EnvironmentAgent

_SCORER = "slimerl.environments.episode_worker:scorer"


@dataclass(eq=False)
class _Lane:
    """One worker and those who wait for it."""

    pool: WorkerPool
    most: int
    waiting: deque[tuple[Advance, "asyncio.Future[Advanced | Failed]"]] = field(default_factory=deque)
    serving: "asyncio.Task[None] | None" = None

    async def ask(self, advance: Advance) -> Advanced | Failed:
        answer: asyncio.Future[Advanced | Failed] = asyncio.get_running_loop().create_future()
        self.waiting.append((advance, answer))
        if self.serving is None or self.serving.done():
            self.serving = asyncio.get_running_loop().create_task(self._serve())
        return await answer

    async def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        await self.pool.close()

    async def _serve(self) -> None:
        # Once more around the loop: those who become ready in the same moment go together.
        await asyncio.sleep(0)
        taken: list[tuple[Advance, asyncio.Future[Advanced | Failed]]] = []
        try:
            while self.waiting:
                taken = [self.waiting.popleft() for _ in range(min(self.most, len(self.waiting)))]
                # of a sample that was cancelled meanwhile nobody wants to know
                taken = [each for each in taken if not each[1].done()]
                for (_, answer), result in zip(taken, await self._advance([each for each, _ in taken]), strict=True):
                    if not answer.done():
                        answer.set_result(result)
        finally:
            for _, answer in (*taken, *self.waiting):
                if not answer.done():
                    answer.set_result(Failed("closed", "the environment's workers were closed"))
            self.waiting.clear()

    async def _advance(self, asked: Sequence[Advance]) -> list[Advanced | Failed]:
        if not asked:
            return []
        name = f"{asked[0].episode_id} and {len(asked) - 1} more" if len(asked) > 1 else asked[0].episode_id
        answer = await self.pool.call(msgspec.msgpack.encode(asked), name)
        if isinstance(answer, bytes):
            return list(msgspec.msgpack.decode(answer, type=list[Advanced]))
        if len(asked) == 1:
            return [answer]
        return [result for each in asked for result in await self._advance([each])]


class EpisodePool:
    """`advance` from `start` to `close`."""

    def __init__(self, pools: Sequence[WorkerPool], most: int) -> None:
        """`pools`: of one worker each."""
        self._lanes = [_Lane(pool, most) for pool in pools]

    @staticmethod
    def of(spec: EnvironmentAgent) -> "EpisodePool":
        options = {"environment": spec.environment, "options": spec.options}
        pools = [WorkerPool(1, spec.timeout_s, _SCORER, options=options) for _ in range(spec.workers)]
        return EpisodePool(pools, spec.episodes_per_call)

    async def start(self) -> None:
        """All at once. Raises RewardUnavailable, after all have come to an end."""
        results = await asyncio.gather(*(lane.pool.start() for lane in self._lanes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes))

    async def advance(self, advance: Advance) -> Advanced | Failed:
        """Failed: the environment failed, or its worker did."""
        number = xxhash.xxh64_intdigest(advance.episode_id.encode()) % len(self._lanes)
        return await self._lanes[number].ask(advance)
