"""A whole rollout in this process: real scheduler, router, store and clients against fake engines and a fake reward."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from fake_engine import FakeEngine

from slimerl.engine.fleet import EngineFleet
from slimerl.engine.protocol import SamplingParams
from slimerl.rewards.outcome import Outcome, RewardRequest, Scored
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.agents.loop import AgentLoop, SingleTurn
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.evaluation import Evaluation
from slimerl.rollout.evaluation_engines import EvaluationEngines
from slimerl.rollout.judge import Judge
from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.prompts import Prompt, PromptStream
from slimerl.rollout.router import Router
from slimerl.rollout.scheduler import Scheduler, SchedulerSettings
from slimerl.rollout.service import ControlService
from slimerl.rollout.shard_link import ShardLink
from slimerl.rollout.shard_scheduler import OrderedGate, OrderedPrompts, ShardScheduler
from slimerl.rollout.speculation.dispatcher import Speculation, SpeculativeDispatcher
from slimerl.rollout.weights import WeightHold
from slimerl.samples.messages import BatchManifest, HoldReply, NextBatchRequest
from slimerl.samples.store import SampleStore

PATIENCE_S = 10.0
SEED = 7


class TellingReward:
    """Judges at once by `verdict`."""

    def __init__(self, verdict: Callable[[RewardRequest], Outcome] = lambda request: Scored(1.0, True)) -> None:
        self.verdict = verdict

    async def score(self, request: RewardRequest) -> Outcome:
        await asyncio.sleep(0)
        return self.verdict(request)


@dataclass
class Scene:
    engines: list[FakeEngine]
    router: Router
    scheduler: Scheduler
    weights: WeightHold
    evaluation: Evaluation
    reward: TellingReward
    service: ControlService

    @property
    def store(self) -> SampleStore:
        return self.scheduler.store

    async def serve(self, version: int) -> None:
        """Every engine holds `version`, as after a sync."""
        await self.scheduler.dispatcher.drain(PATIENCE_S)
        for engine in self.engines:
            engine.version = str(version)
        self.router.release(version, [engine.engine_id for engine in self.engines], {})
        self.scheduler.advance(version)
        self.scheduler.dispatcher.resume()

    async def batch(self, step: int, timeout_s: float = PATIENCE_S) -> BatchManifest:
        return await self.service.next_batch(NextBatchRequest(step, timeout_s))

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for something that other tasks bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not ready():
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """No slot is taken and the books are closed on whatever is not ready."""
        await self.until(lambda: not self.router.running() and not self.scheduler._tasks)
        self.store.check()


def serve_the_same_weights(reply: HoldReply, version: int) -> None:
    """An update of real engines by which nothing changes but the version."""
    with EngineFleet(reply.engines, 30.0, reply.pause) as fleet:
        fleet.pause()
        fleet.begin_weight_update()
        fleet.end_weight_update(version)
        fleet.flush_cache()
        fleet.continue_generation()


@asynccontextmanager
async def rollout(
    engines: int = 2,
    groups: int = 2,
    size: int = 3,
    staleness: int = 0,
    capacity: int = 64,
    steps: int = 100,
    request_s: float = PATIENCE_S,
    on_reward_failure: str = "drop",
    max_new_tokens: int = 32,
    lag: LoopLag | None = None,
    dynamic_sampling_rounds: int = 0,
    chunk_tokens: int | None = None,
    on_update: str = "retract",
    agent: AgentLoop | None = None,
    speculation: Speculation | None = None,
    oversample: float | None = None,
    routing: bool = False,
    shard: int | None = None,
    evaluators: int = 0,
    is_due: Callable[[int], bool] = lambda version: True,
) -> AsyncIterator[Scene]:
    """Running, with its engines joined but nothing released yet. `shard`: its number, where it is one of several;
    `evaluators`: the last so many of the engines evaluate, the versions that are due, and do nothing else."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine(f"engine-{number}")) for number in range(engines)]
        router = KvRouter(capacity, size, EngineModel(slots=capacity), clock=time.monotonic)
        clients = EngineClients(request_s)
        dispatcher = Dispatcher(router, clients, request_s)
        if speculation is not None:
            dispatcher = SpeculativeDispatcher(router, clients, request_s, speculation=speculation)
        reward = TellingReward()
        judge = Judge(lambda tokens: " ".join(map(str, tokens)), reward)
        params = SamplingParams(max_new_tokens, stop_token_ids=(2,))
        prompts = [Prompt(f"p{number}", (10, number), str(number)) for number in range(16)]
        gate, stream = StalenessGate(groups, staleness, steps, oversample=oversample), PromptStream(prompts, SEED)
        kind: Callable[..., Scheduler] = Scheduler
        if shard is not None:
            gate = ordered = OrderedGate(groups, staleness, steps)
            stream = OrderedPrompts(prompts, SEED, next_position=ordered.draw)
            kind = partial(ShardScheduler, link=ShardLink(shard, 1))
        scheduler = kind(
            SchedulerSettings(
                *(groups, size, SEED, params, on_reward_failure, chunk_tokens, dynamic_sampling_rounds), routing=routing
            ),
            stream,
            gate,
            SampleStore(smallest_group=min(2, size)),
            dispatcher,
            judge,
            agent or SingleTurn(),
        )
        apart = None
        if evaluators:
            names = frozenset(fake.engine_id for fake in fakes[-evaluators:])
            own = KvRouter(capacity, size, EngineModel(slots=capacity), clock=time.monotonic)
            apart = EvaluationEngines(names, Dispatcher(own, clients, request_s), is_due)
        weights = WeightHold(
            dispatcher, clients, engines_expected=engines, start_s=PATIENCE_S, on_update=on_update, evaluators=apart
        )
        held_out = [Prompt(f"h{number}", (20, number), str(number)) for number in range(6)]
        evaluation = Evaluation(
            *(held_out, SamplingParams(max_new_tokens, 0.0, stop_token_ids=(2,)), SEED),
            *(dispatcher if apart is None else apart.dispatcher, judge),
        )
        if agent is not None:
            evaluation = replace(evaluation, agent=agent)
        service = ControlService(
            "token", router, clients, scheduler, weights, evaluation, lag or LoopLag(), speculation
        )
        for fake in fakes:
            clients.add(fake.info)
            weights.pools.of(fake.engine_id).router.join(fake.info)
        running = asyncio.ensure_future(scheduler.run())
        try:
            yield Scene(fakes, router, scheduler, weights, evaluation, reward, service)
            assert not running.done(), "the scheduler's loop ended"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await weights.close()
            for each in weights.pools.dispatchers():
                await each.close()
            await clients.close()
            judge.close()
