"""Engines of evaluations alone: no rollout comes to them, they keep the version that they evaluate, and hold up nobody.

In each scene engine-0 has the rollouts and engine-1 evaluates.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_engine import FakeEngine
from scene import PATIENCE_S, Scene, rollout

from slimerl.rollout.evaluation import EvaluationError
from slimerl.samples.messages import (
    EngineInfo,
    EngineLost,
    EngineState,
    EvaluateReply,
    EvaluateRequest,
    HoldRequest,
    ReleaseRequest,
    SyncWanted,
)

Play = Callable[[Scene], Coroutine[Any, Any, None]]


def play(scene: Play, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), rollout(engines=2, evaluators=1, **options) as made:
            await scene(made)

    asyncio.run(run())


async def sync(made: Scene, version: int, dirty: dict[str, str] | None = None) -> list[str]:
    """What the trainer's sync does; returns which engines it wrote to."""
    reply = await made.weights.hold(HoldRequest(version, PATIENCE_S))
    held = [one.engine_id for one in reply.engines]
    for engine in made.engines:
        if engine.engine_id in held:
            engine.version = str(version)
    whole = [name for name in held if name not in (dirty or {})]
    made.weights.release(ReleaseRequest(reply.lease_id, version, whole, dirty or {}))
    return held


async def step(made: Scene, number: int) -> None:
    """Of the trainer: it takes the batch, and its new weights come."""
    made.scheduler.trained((await made.batch(number)).batch_id)
    await sync(made, number)


async def evaluate(made: Scene, step: int, timeout_s: float = PATIENCE_S) -> EvaluateReply | SyncWanted:
    return await made.service.evaluate(EvaluateRequest(step, timeout_s))


def begin(made: Scene, step: int) -> list[int]:
    """Returns what the trainer is told: which evaluations it is to wait for."""
    made.service.begin_evaluation(EvaluateRequest(step, PATIENCE_S))
    return made.service.status().evaluating


def evaluator(made: Scene) -> EngineInfo:
    return made.weights.pools.engine("engine-1")


async def come_back(made: Scene) -> FakeEngine:
    """A new server in the place of the evaluator."""
    engine = FakeEngine("engine-1")
    await engine.__aenter__()
    made.engines[1] = engine
    made.service.register(engine.info)
    return engine


async def die(made: Scene) -> None:
    await made.engines[1].stop()
    made.service.lost(EngineLost("engine-1", "killed", PATIENCE_S))


def test_rollouts_never_go_to_the_engines_of_evaluations_and_evaluations_to_no_other():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        for number in range(1, 4):
            await step(made, number)
            reply = await evaluate(made, number)
            assert isinstance(reply, EvaluateReply)
            assert (reply.version, reply.prompts) == (number, 6)
        asked = [{each["rid"].startswith("evaluation/") for each in engine.requests} for engine in made.engines]
        assert asked == [{False}, {True}]
        assert made.router.serving() == ("engine-0",)

    play(scene, capacity=1)  # rollouts want more than one engine has room for


def test_an_engine_keeps_its_version_while_it_evaluates_and_the_others_go_on():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[1].open.clear()
        assert begin(made, 0) == [0]
        await made.engines[1].running_requests(6)
        for number in range(1, 4):
            made.scheduler.trained((await made.batch(number)).batch_id)
            assert await sync(made, number) == ["engine-0"]
            assert begin(made, 0) == [0], "it still runs"
        assert (evaluator(made).state, evaluator(made).version) == (EngineState.SERVING, 0)
        made.engines[1].open.set()
        await made.until(lambda: begin(made, 0) == [])
        reply = await evaluate(made, 0)
        assert isinstance(reply, EvaluateReply)
        assert (reply.version, reply.prompts, reply.failures) == (0, 6, 0)
        assert len(made.engines[1].requests) == 6, "nothing was asked twice"

    play(scene)


def test_only_a_version_that_is_evaluated_is_brought_to_them():
    async def scene(made: Scene) -> None:
        written = [await sync(made, 0)]
        for number in range(1, 5):
            made.scheduler.trained((await made.batch(number)).batch_id)
            written.append(await sync(made, number))
        both = ["engine-0", "engine-1"]
        assert written == [both, ["engine-0"], both, ["engine-0"], both]
        assert evaluator(made).version == 4

    play(scene, is_due=lambda version: version % 2 == 0)


def test_a3_an_evaluation_that_is_asked_for_while_somebody_waits_for_it_is_made_once():
    """Injected: the connection of the first call breaks, and the trainer makes it again."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[1].open.clear()
        assert begin(made, 0) == [0]
        first = asyncio.create_task(evaluate(made, 0))
        await made.engines[1].running_requests(6)
        again = asyncio.create_task(evaluate(made, 0))
        await asyncio.sleep(0)
        made.engines[1].open.set()
        replies = await asyncio.gather(first, again)
        assert replies[0] == replies[1]
        assert isinstance(replies[0], EvaluateReply)
        assert sum(each["rid"].startswith("evaluation/") for each in made.engines[1].requests) == 6

    play(scene)


def test_an_evaluation_that_runs_survives_the_same_version_being_brought_again():
    """A rollout engine came back: its sync is of a version that is due, and is evaluated now."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[1].open.clear()
        begin(made, 0)
        await made.engines[1].running_requests(6)
        assert await sync(made, 0) == ["engine-0"]
        made.engines[1].open.set()
        reply = await evaluate(made, 0)
        assert isinstance(reply, EvaluateReply)
        assert reply.failures == 0

    play(scene)


def test_a3_an_evaluation_whose_engine_ends_is_given_up_once_its_weights_are_gone():
    """Injected: the only one dies, and comes back without weights; the trainer is a step on."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[1].open.clear()
        begin(made, 0)
        await made.engines[1].running_requests(6)
        await die(made)
        assert begin(made, 0) == [0], "it might come back before there are other weights"
        await step(made, 1)
        assert begin(made, 0) == []
        assert await evaluate(made, 0) == SyncWanted([]), "at once: nobody can bring version 0 any more"
        engine = await come_back(made)
        assert (await made.batch(2)).samples, "rollouts want no sync for its sake"
        assert evaluator(made).state is EngineState.JOINING
        assert await sync(made, 2) == ["engine-0", "engine-1"]
        reply = await evaluate(made, 2)
        assert isinstance(reply, EvaluateReply)
        assert (reply.version, reply.prompts) == (2, 6)
        await engine.stop()

    play(scene)


def test_an_evaluation_for_which_the_trainer_waits_gets_its_weights_again():
    """Injected: the only one dies in the last evaluation of a run."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[1].open.clear()
        waiting = asyncio.ensure_future(evaluate(made, 0))
        await made.engines[1].running_requests(6)
        await die(made)
        engine = await come_back(made)
        assert await waiting == SyncWanted(["engine-1"])
        assert await sync(made, 0) == ["engine-0", "engine-1"]
        assert isinstance(await evaluate(made, 0), EvaluateReply)
        await engine.stop()

    play(scene)


def test_another_version_is_never_evaluated_in_the_place_of_the_one_asked_for():
    """Injected: an evaluator that was not written to, for whatever reason."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await step(made, 1)
        assert begin(made, 1) == [1]
        assert await evaluate(made, 1) == SyncWanted(["engine-1"])
        assert not made.engines[1].requests

    play(scene, is_due=lambda version: version == 0)


def test_an_evaluator_that_refused_its_weights_is_named_and_has_the_next_ones():
    async def scene(made: Scene) -> None:
        await sync(made, 0, dirty={"engine-1": "digest differs"})
        with pytest.raises(EvaluationError, match="serves version 0: engine-1: digest differs"):
            await evaluate(made, 0)
        assert begin(made, 0) == [0]
        await step(made, 1)
        assert begin(made, 0) == [], "in the background it is given up when the next weights come"
        assert isinstance(await evaluate(made, 1), EvaluateReply)

    play(scene)


def test_a_hold_without_an_engine_for_rollouts_is_refused_whoever_evaluates():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await made.engines[0].stop()
        made.service.lost(EngineLost("engine-0", "killed", 0.0))
        with pytest.raises(Exception, match="no engine is left to hold"):
            await sync(made, 1)
        assert isinstance(await evaluate(made, 0), EvaluateReply)

    play(scene)


def test_a5_a_lease_that_runs_out_quarantines_evaluators_that_were_not_confirmed():
    """Fault: the trainer ends after the commit of the rollouts' engine."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await made.weights.hold(HoldRequest(1, 0.1))
        made.engines[0].version = "1"
        await made.until(lambda: made.router.version == 1)
        assert evaluator(made).state is EngineState.DIRTY
        assert await sync(made, 2) == ["engine-0", "engine-1"]
        assert evaluator(made).state is EngineState.SERVING

    play(scene)
