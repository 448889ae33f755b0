"""Held-out evaluation: one version, failures apart from wrong answers, ahead of the training requests."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from scene import Scene, rollout

from slimerl.engine.protocol import SamplingParams
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.rewards.outcome import Failed, RewardRequest, Scored, Unparsable
from slimerl.rollout.agents.loop import SingleTurn
from slimerl.rollout.evaluation import EvaluationError, HeldOutSet
from slimerl.rollout.prompts import Prompt
from slimerl.samples.messages import EvaluateReply, EvaluateRequest

Play = Callable[[Scene], Coroutine[Any, Any, None]]


def play(scene: Play, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), rollout(**options) as made:
            await scene(made)

    asyncio.run(run())


async def evaluate(made: Scene, timeout_s: float = 10.0) -> EvaluateReply:
    return await made.evaluation.run(EvaluateRequest(3, timeout_s))


def by_answer(**outcomes: Any) -> Callable[[RewardRequest], Any]:
    """Outcome of the held-out prompt with that answer; right for all others and for training samples."""
    return lambda request: (
        outcomes.get(f"h{request.answer}", Scored(1.0, True))
        if request.sample_id.startswith("evaluation/")
        else Scored(1.0, True)
    )


def test_r2_failures_are_counted_apart_from_wrong_answers():
    async def scene(made: Scene) -> None:
        made.reward.verdict = by_answer(h0=Scored(0.0, False), h1=Unparsable(), h2=Failed("timeout"))
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        made.engines[0].faults.append("400")
        reply = await evaluate(made)
        assert (reply.step, reply.version) == (3, 0)
        # h0 was refused by the engine and h2 could not be judged; of the other four only h1 is not right.
        assert (reply.prompts, reply.failures, reply.accuracy) == (4, 2, 3 / 4)
        assert reply.mean_response_tokens > 0

    play(scene, engines=1, capacity=1)


def test_a6_a_bug_in_one_answer_is_a_failure_of_it_and_not_of_the_evaluation():
    """Injected: the agent loop raises at one prompt, judging at another, and the task of a third is cancelled."""

    class Buggy(SingleTurn):
        async def __call__(self, policy: Any, sample: Any, prompt: Any) -> Any:
            if prompt.prompt_id == "h0":
                raise KeyError("of the loop")
            if prompt.prompt_id == "h3":
                raise asyncio.CancelledError
            return await super().__call__(policy, sample, prompt)

    def judged(request: RewardRequest) -> Any:
        if request.sample_id == "evaluation/h1":
            raise ZeroDivisionError
        return Scored(1.0, True)

    async def scene(made: Scene) -> None:
        made.reward.verdict = judged
        await made.serve(0)
        reply = await replace(made.evaluation, agent=Buggy()).run(EvaluateRequest(3, 10.0))
        assert (reply.prompts, reply.failures, reply.accuracy) == (3, 3, 1.0)

    play(scene)


def test_accuracy_is_the_fraction_of_right_answers():
    async def scene(made: Scene) -> None:
        made.reward.verdict = by_answer(h0=Scored(0.0, False), h1=Unparsable(), h2=Failed("timeout"))
        await made.serve(0)
        reply = await evaluate(made)
        assert (reply.prompts, reply.failures, reply.accuracy) == (5, 1, 3 / 5)

    play(scene)


def test_evaluation_samples_as_its_own_spec_says_and_stays_out_of_the_books():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        before = made.store.counts()
        sent = sum(len(engine.requests) for engine in made.engines)
        await evaluate(made)
        requests = [request for engine in made.engines for request in engine.requests]
        held_out = [request for request in requests if request["rid"].startswith("evaluation/")]
        assert len(held_out) == len(requests) - sent == 6
        assert {request["sampling_params"]["temperature"] for request in held_out} == {0.0}
        assert made.store.counts() == before

    play(scene)


def test_evaluation_goes_ahead_of_waiting_training_requests():
    async def scene(made: Scene) -> None:
        made.engines[0].open.clear()
        await made.serve(0)
        await made.engines[0].running_requests(1)
        evaluating = asyncio.ensure_future(evaluate(made))
        await asyncio.sleep(0)
        made.engines[0].open.set()
        await evaluating
        order = [request["rid"].startswith("evaluation/") for request in made.engines[0].requests]
        assert order[:7] == [False, True, True, True, True, True, True]

    play(scene, engines=1, capacity=1)


def test_an_evaluation_that_two_versions_answer_is_refused():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        made.engines[0].open.clear()
        evaluating = asyncio.ensure_future(evaluate(made))
        await made.engines[0].running_requests(2)
        serving = asyncio.ensure_future(made.serve(1))
        await asyncio.sleep(0)
        made.engines[0].open.set()
        await serving
        with pytest.raises(EvaluationError, match="version 1 was released while version 0 was evaluated"):
            await evaluating

    play(scene, engines=1, capacity=2)


def test_a3_an_evaluation_has_a_deadline_and_leaves_nothing_behind():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        made.engines[0].open.clear()
        with pytest.raises(DeadlineExceeded, match=r"the evaluation at step 3 \(0 of 6 prompts done\)"):
            await evaluate(made, timeout_s=0.05)
        assert made.router.running() == []
        made.engines[0].open.set()

    play(scene, engines=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: None, "no weights have been released yet"),
        (lambda made: setattr(made, "evaluation", replace(made.evaluation, prompts=[])), "set data.eval_path"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(change, message):
    async def scene(made: Scene) -> None:
        change(made)
        with pytest.raises(EvaluationError, match=message):
            await evaluate(made)

    play(scene)


def test_an_evaluation_in_which_everything_fails_is_no_accuracy_of_0():
    async def scene(made: Scene) -> None:
        made.reward.verdict = lambda request: Failed("timeout")
        await made.serve(0)
        with pytest.raises(EvaluationError, match=r"all 6 prompts failed: {'reward_timeout': 6}"):
            await evaluate(made)

    play(scene)


VOTES = HeldOutSet("votes", [Prompt("v", (30,), "7"), Prompt("w", (31,), "8")], SamplingParams(8, 0.7), 4, (1, 2), (3,))


def of_sets(*said: str | None) -> Callable[[RewardRequest], Any]:
    """What each of a set's answers to a prompt says; "right" is right, None cannot be judged."""

    def verdict(request: RewardRequest) -> Any:
        if not request.sample_id.startswith("evaluation.votes/"):
            return Scored(1.0, True)
        answer = said[int(request.sample_id.rpartition("/")[2])]
        return Failed("timeout") if answer is None else Scored(0.0, answer == "right", said=answer)

    return verdict


def test_a_set_has_its_own_sampling_and_its_statistics():
    async def scene(made: Scene) -> None:
        made.evaluation = replace(made.evaluation, sets=[VOTES])
        made.reward.verdict = of_sets("right", "a", "right", "b")
        await made.serve(0)
        figures = (await evaluate(made)).figures
        # of 2 answers of these 4: 5 of 6 pairs hold a right one; of 3: the right one has 2 votes, or draws with both
        assert figures["eval/votes/pass_at_1"] == 0.5
        assert figures["eval/votes/pass_at_2"] == pytest.approx(5 / 6)
        assert figures["eval/votes/majority_at_3"] == pytest.approx((2 * 1 + 2 * 1 / 3) / 4)
        assert figures["eval/votes/pass_at_1_low"] < 0.5 < figures["eval/votes/pass_at_1_high"]
        assert (figures["eval/votes/prompts"], figures["eval/votes/failures"]) == (2, 0)
        assert figures["eval/accuracy_low"] < 1.0 == figures["eval/accuracy_high"]
        requests = [request for engine in made.engines for request in engine.requests]
        own = [each["sampling_params"] for each in requests if each["rid"].startswith("evaluation.votes/")]
        assert [each["temperature"] for each in own] == [0.7] * 8
        assert len({each["sampling_seed"] for each in own}) == 8, "each answer has draws of its own"

    play(scene)


def test_r2_answers_that_failed_make_fewer_answers_and_none_at_all_is_an_error():
    async def scene(made: Scene) -> None:
        made.evaluation = replace(made.evaluation, sets=[VOTES])
        made.reward.verdict = of_sets("right", "a", "right", None)
        await made.serve(0)
        figures = (await evaluate(made)).figures
        assert figures["eval/votes/pass_at_1"] == pytest.approx(2 / 3)
        assert figures["eval/votes/failures"] == 2
        made.reward.verdict = of_sets("right", "a", None, None)
        with pytest.raises(EvaluationError, match="set 'votes': no prompt has 3 judged answers for majority@3"):
            await evaluate(made)
        made.reward.verdict = of_sets("right", "", "", "")
        with pytest.raises(EvaluationError, match="answer_not_told"):
            await evaluate(made)

    play(scene)


def test_an_evaluation_that_was_begun_is_not_done_again():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        request = EvaluateRequest(3, 10.0)
        made.service.begin_evaluation(request)
        made.service.begin_evaluation(request)
        reply = await made.service.evaluate(request)
        assert (reply.version, reply.prompts) == (0, 6)
        asked = [each["rid"] for engine in made.engines for each in engine.requests]
        assert sum(rid.startswith("evaluation/") for rid in asked) == 6

    play(scene)


def test_a_version_that_comes_before_a_begun_evaluation_has_ended_is_told():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.settled()
        made.engines[0].open.clear()
        made.service.begin_evaluation(EvaluateRequest(0, 10.0))
        await made.engines[0].running_requests(2)
        made.engines[0].open.set()
        await made.serve(1)
        with pytest.raises(EvaluationError, match="version 1 was released while version 0 was evaluated"):
            await made.service.evaluate(EvaluateRequest(0, 10.0))

    play(scene, engines=1, capacity=2)
