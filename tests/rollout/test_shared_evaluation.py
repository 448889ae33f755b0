"""Held-out evaluation by several rollout processes: the figures of one, from the engines of all."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from rollout_fleet import listen, service_of
from scene import Scene, rollout

from slimerl.engine.protocol import SamplingParams
from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable
from slimerl.rollout.announcing import announce
from slimerl.rollout.evaluation import Evaluation, EvaluationError, HeldOutSet
from slimerl.rollout.front import ShardService
from slimerl.rollout.process_calls import ProcessCalls
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.shared_evaluation import over_all
from slimerl.samples.messages import EvaluateReply, EvaluateRequest, ServiceAddress, address_file

PROMPTS = 6
"""Of the scene's own; and there is a set with an odd number of prompts."""


def judged(request: RewardRequest) -> Outcome:
    outcomes = {"0": Scored(0.0, False), "1": Unparsable(), "2": Failed("timeout"), "s1": Scored(0.0, False, "7")}
    return outcomes.get(request.answer, Scored(1.0, True))


def with_a_set(evaluation: Evaluation) -> Evaluation:
    prompts = [Prompt(f"s{number}", (30, number), f"s{number}") for number in range(3)]
    params = SamplingParams(32, 1.0, stop_token_ids=(2,))
    return replace(evaluation, sets=[HeldOutSet("set", prompts, params, samples=2, pass_at=(1, 2))])


@dataclass
class Two:
    """Scenes of two processes; the service of the second can be put behind its address, and taken away."""

    run_dir: Path
    scenes: list[Scene]
    evaluation: Evaluation

    async def evaluate(self, step: int = 3, timeout_s: float = 10.0) -> EvaluateReply:
        return await self.evaluation.run(EvaluateRequest(step, timeout_s))

    async def listen(self) -> web.AppRunner:
        service = service_of(self.scenes[1], ShardService)
        service.evaluation = with_a_set(service.evaluation)
        return await listen(self.run_dir, 1, service)


def play(act: Callable[[Two], Coroutine[Any, Any, Any]], run_dir: Path) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            scenes = [await stack.enter_async_context(rollout(engines=1, steps=0)) for _ in range(2)]
            for scene in scenes:
                scene.reward.verdict = judged
                await scene.serve(0)
            calls = ProcessCalls(run_dir)
            stack.push_async_callback(calls.close)
            return await act(Two(run_dir, scenes, over_all(with_a_set(scenes[0].evaluation), calls, 2)))

    return asyncio.run(run())


def test_the_figures_are_those_of_a_single_process_and_each_answers_its_part(tmp_path):
    async def act(two: Two) -> EvaluateReply:
        runner = await two.listen()
        try:
            reply = await two.evaluate()
            assert [scene.engines[0].calls["/generate"] for scene in two.scenes] == [3 + 2 * 2, 3 + 1 * 2]
            return reply
        finally:
            await runner.cleanup()

    async def alone() -> EvaluateReply:
        async with rollout(engines=1, steps=0) as scene:
            scene.reward.verdict = judged
            await scene.serve(0)
            return await with_a_set(scene.evaluation).run(EvaluateRequest(3, 10.0))

    reply, expected = play(act, tmp_path), asyncio.run(alone())
    assert msgspec.structs.replace(reply, seconds=0.0) == msgspec.structs.replace(expected, seconds=0.0)
    assert (reply.prompts, reply.failures, reply.accuracy) == (PROMPTS - 1, 1, 3 / 5)
    assert reply.figures["eval/set/pass_at_1"] == 2 / 3


def test_a5_a_process_that_is_not_there_is_asked_once_another_is_in_its_place(tmp_path):
    """Injected: the address of the second process is of one that has ended; the next one announces itself later."""

    async def act(two: Two) -> None:
        announce(tmp_path / address_file(1), ServiceAddress("http://127.0.0.1:9", "of another", 1))
        evaluating = asyncio.ensure_future(two.evaluate())
        await two.scenes[0].until(lambda: two.scenes[0].engines[0].calls["/generate"] == 7)
        assert not evaluating.done()
        runner = await two.listen()
        try:
            assert (await evaluating).prompts == PROMPTS - 1
        finally:
            await runner.cleanup()

    play(act, tmp_path)


def test_a_part_that_is_asked_for_again_is_not_made_again(tmp_path):
    """Injected: the first process asks, is gone before the answer, and the one in its place asks."""

    async def act(two: Two) -> None:
        runner, engine = await two.listen(), two.scenes[1].engines[0]
        try:
            engine.open.clear()
            asking = asyncio.ensure_future(two.evaluate())
            await engine.running_requests(5)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            again = asyncio.ensure_future(two.evaluate())
            engine.open.set()
            assert (await again).prompts == PROMPTS - 1
            assert engine.calls["/generate"] == 5
        finally:
            await runner.cleanup()

    play(act, tmp_path)


def test_parts_of_two_versions_are_no_evaluation(tmp_path):
    async def act(two: Two) -> None:
        runner = await two.listen()
        try:
            await two.scenes[1].serve(1)
            with pytest.raises(EvaluationError, match="process 1 evaluated version 1, the first one version 0"):
                await two.evaluate()
        finally:
            await runner.cleanup()

    play(act, tmp_path)
