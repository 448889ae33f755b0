"""An engine that ends and is started again: its requests wait for it, the trainer is asked for a sync, no sample is
lost."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_engine import FakeEngine
from scene import PATIENCE_S, Scene, rollout

from slimerl.rollout.service import NoEngine
from slimerl.rollout.weights import HoldError
from slimerl.samples.messages import (
    BatchManifest,
    EngineLost,
    EvaluateReply,
    EvaluateRequest,
    HoldRequest,
    ReleaseRequest,
    SyncWanted,
)

Play = Callable[[Scene], Coroutine[Any, Any, None]]


def play(scene: Play, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), rollout(engines=1, **options) as made:
            await scene(made)

    asyncio.run(run())


async def die(made: Scene, returns_s: float = PATIENCE_S, told: bool = True) -> None:
    """The only engine, with requests in it; whoever started it tells of it."""
    await made.engines[0].stop()
    if told:
        made.service.lost(EngineLost("engine-0", "killed", returns_s))


async def come_back(made: Scene) -> FakeEngine:
    """A new server of the same name."""
    engine = FakeEngine("engine-0")
    await engine.__aenter__()
    made.engines[:] = [engine]
    made.service.register(engine.info)
    return engine


async def sync(made: Scene, version: int) -> None:
    reply = await made.weights.hold(HoldRequest(version, PATIENCE_S))
    for engine in made.engines:
        engine.version = str(version)
    made.weights.release(ReleaseRequest(reply.lease_id, version, [one.engine_id for one in reply.engines]))


def ids(manifest: BatchManifest | SyncWanted) -> list[str]:
    assert isinstance(manifest, BatchManifest)
    return [sample.sample_id for sample in manifest.samples]


@pytest.mark.parametrize("told_first", [True, False])
def test_a5_the_only_engine_dies_with_every_request_in_it_and_no_sample_is_lost(told_first):
    """Fault: the server is gone with six requests in it; who started it says so before they fail, or after."""

    async def scene(made: Scene) -> None:
        await made.serve(0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(6)
        batch = asyncio.ensure_future(made.batch(0))
        if told_first:
            made.service.lost(EngineLost("engine-0", "killed", PATIENCE_S))
            await die(made, told=False)
        else:
            await die(made, told=False)
            await asyncio.sleep(0.3)
            made.service.lost(EngineLost("engine-0", "killed", PATIENCE_S))
        engine = await come_back(made)
        assert await batch == SyncWanted(["engine-0"])
        assert not engine.requests, "it holds no verified weights yet"
        await sync(made, 0)
        assert len(ids(await made.batch(0))) == 6
        await made.settled()
        assert not made.store.counts().dropped
        await engine.stop()

    play(scene)


def test_a_batch_is_not_refused_while_its_only_engine_is_started_again():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(6)
        await die(made)
        await made.until(lambda: not made.scheduler.dispatcher.in_flight)
        batch = asyncio.ensure_future(made.batch(0))
        await asyncio.sleep(0.05)
        assert not batch.done()
        made.service.lost(EngineLost("engine-0", "given up", 0.0))
        with pytest.raises(NoEngine, match="given up"):
            await batch

    play(scene)


def test_an_evaluation_whose_engine_died_asks_for_a_sync_and_is_done_anew():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        made.engines[0].open.clear()
        evaluating = asyncio.ensure_future(made.service.evaluate(EvaluateRequest(0, PATIENCE_S)))
        await made.engines[0].running_requests(6)
        await die(made)
        engine = await come_back(made)
        assert await evaluating == SyncWanted(["engine-0"])
        await sync(made, 0)
        reply = await made.service.evaluate(EvaluateRequest(0, PATIENCE_S))
        assert isinstance(reply, EvaluateReply)
        assert (reply.prompts, reply.failures) == (6, 0)
        await engine.stop()

    play(scene)


def test_a_hold_for_which_no_engine_is_left_waits_for_the_one_that_comes_back():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        await die(made)
        holding = asyncio.ensure_future(made.weights.hold(HoldRequest(1, PATIENCE_S)))
        await asyncio.sleep(0.05)
        assert not holding.done()
        engine = await come_back(made)
        assert [one.url for one in (await holding).engines] == [engine.url]
        await engine.stop()

    play(scene)


def test_a_hold_is_refused_at_once_where_no_engine_comes_back():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        await die(made, returns_s=0.0)
        with pytest.raises(HoldError, match="no engine is left"):
            await made.weights.hold(HoldRequest(1, PATIENCE_S))

    play(scene)
