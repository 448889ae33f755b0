"""Drafts while weights change, engines fail and requests are cancelled: nothing is lost, doubled or drawn wrongly."""

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from policy_engine import STOP, policy
from speculation_stage import LENGTH, NEW, OLD, PROMPT, Stage, log_law, request, stage

from slimerl.rollout.speculation import rules


def test_a_draft_that_is_scored_while_weights_change_is_forgotten_whole_and_nothing_is_lost():
    """Injected: new weights come in, and are released, while scores are under way."""

    async def run() -> None:
        async with stage(siblings=False) as made:
            assert made.speculation is not None
            await made.epoch(0, 8)
            made.serve(1)

            async def update(body: dict[str, Any]) -> None:
                if "logprob_start_len" in body and made.engine.version == 1:
                    made.serve(2)

            made.engine.policies = (OLD, NEW, policy(9))
            made.engine.before = update
            made.engine.requests.clear()
            completion = await made.sample(1, 0)
            generation = completion.generation
            assert len(made.engine.scored) == 1
            assert tuple(made.engine.decoded[0]["input_ids"]) == PROMPT
            assert set(generation.versions) == {2}
            assert generation.logprobs == pytest.approx(log_law(policy(9), generation.tokens), abs=1e-5)
            assert made.speculation.take_figures()["speculation/discarded_drafts"] == 1

    asyncio.run(run())


def test_scores_of_new_weights_that_are_not_released_yet_are_forgotten():
    """Injected: the engine has the new weights already; the rollout does not know of them."""

    async def run() -> None:
        async with stage(siblings=False) as made:
            assert made.speculation is not None
            await made.epoch(0, 8)
            made.serve(1)
            made.engine.policies = (OLD, NEW, policy(9))
            made.dispatcher.hold()
            waiting = asyncio.ensure_future(made.sample(1, 0))
            await asyncio.sleep(0)
            made.serve(2)
            made.dispatcher.resume()
            generation = (await waiting).generation
            assert set(generation.versions) == {2}
            assert generation.logprobs == pytest.approx(log_law(policy(9), generation.tokens), abs=1e-5)

    asyncio.run(run())


def find_rejection(made: Stage) -> int:
    """Number of a sample of epoch 1 whose draft is rejected at its first token."""
    assert made.speculation is not None
    for number in range(1000):
        wanted = request(1, number)
        draft = made.speculation.draft(wanted, list(PROMPT), LENGTH, version=1)
        assert draft is not None
        noise = rules.keyed_uniforms(wanted.params.seed or 0, wanted.session, len(PROMPT), 1)
        if noise[0] >= NEW[PROMPT[-1], draft.tokens[0]]:
            return number
    raise AssertionError("none in a thousand")


def test_a_rejected_token_is_not_drawn_where_new_weights_come_before_the_residual():
    """Its log-probability is that of the draw: rejected by the old weights, drawn among the others by the new ones."""

    async def run() -> None:
        async with stage(siblings=False, policies=(OLD, NEW, policy(9))) as made:
            await made.epoch(0, 8)
            made.serve(1)
            number = find_rejection(made)
            rejected = made.speculation.draft(request(1, number), list(PROMPT), LENGTH, 1).tokens[0]  # type: ignore

            async def update(body: dict[str, Any]) -> None:
                if "logit_bias" in body["sampling_params"] and made.engine.version == 1:
                    made.engine.aborts = 2
                    made.serve(2)

            made.engine.before = update
            generation = (await made.sample(1, number)).generation
            first, law = generation.tokens[0], policy(9)[PROMPT[-1]]
            assert first != rejected
            assert set(generation.versions) == {2}
            among_others = math.log(law[first] / (1 - law[rejected]))
            wanted = among_others + math.log(1 - NEW[PROMPT[-1], rejected])
            assert generation.logprobs[0] == pytest.approx(wanted, abs=1e-5)
            biased = [body for body in made.engine.decoded if "logit_bias" in body["sampling_params"]]
            assert len(biased) == 3, "the two that the update aborted are made up for"

    asyncio.run(run())


def test_a7_a_residual_that_an_update_ends_with_its_token_ends_nothing_else_and_goes_on_behind_no_stop():
    """Injected: the request for the residual is told to be aborted, with its token; at the end of the budget, too."""

    async def run() -> None:
        async with stage(siblings=False, policies=(OLD, NEW, NEW)) as made:
            await made.epoch(0, 8)
            made.serve(1)

            async def update(body: dict[str, Any]) -> None:
                if "logit_bias" in body["sampling_params"] and made.engine.version == 1:
                    made.engine.late_aborts = 1
                    made.serve(2)

            made.engine.before = update
            ends = Counter()
            for number in range(300):
                made.engine.version = made.dispatcher.router.version = 1
                budget = 1 + number % 3
                generation = (await made.sample(1, number, max_new_tokens=budget)).generation
                assert STOP not in generation.tokens[:-1]
                wanted = "stop" if generation.tokens[-1] == STOP else "length"
                assert (generation.finish_reason, wanted) in {("stop", "stop"), ("length", "length")}
                assert len(generation.tokens) == budget or wanted == "stop"
                ends[wanted] += 1
            assert min(ends.values()) > 5
            assert all(body["sampling_params"]["max_new_tokens"] for body in made.engine.decoded)

    asyncio.run(run())


def test_tokens_kept_before_an_update_keep_the_version_and_log_probability_of_the_weights_that_scored_them():
    async def run() -> None:
        async with stage(siblings=False, policies=(OLD, NEW, policy(9))) as made:
            await made.epoch(0, 8)
            made.serve(1)

            async def update(body: dict[str, Any]) -> None:
                if "logprob_start_len" not in body and made.engine.version == 1:
                    made.serve(2)

            made.engine.before = update
            for number in range(50):
                made.engine.version = made.dispatcher.router.version = 1
                generation = (await made.sample(1, number)).generation
                assert generation.versions == sorted(generation.versions)
                if set(generation.versions) == {1, 2}:
                    break
            kept = generation.versions.count(1)
            assert generation.logprobs[:kept] == pytest.approx(log_law(NEW, generation.tokens)[:kept], abs=1e-5)
            behind = log_law(policy(9), generation.tokens)[kept + 1 :]
            assert generation.logprobs[kept + 1 :] == pytest.approx(behind, abs=1e-5)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["500", "abort", "garbage"])
def test_a_draft_that_is_not_scored_costs_the_draft_alone(fault: str, caplog: pytest.LogCaptureFixture):
    """Injected: the engine refuses to score, aborts, or answers scores of other tokens."""

    async def run() -> None:
        async with stage(siblings=False) as made:
            assert made.speculation is not None
            await made.epoch(0, 8)
            made.serve(1)
            made.engine.faults.extend([fault] * 3)
            begun: list[int] = []
            plain = request(1, 0)
            generation = (await made.dispatcher.generate(plain, lambda: begun.append(1))).generation
            assert begun == [1]
            assert generation.logprobs == pytest.approx(log_law(NEW, generation.tokens), abs=1e-5)
            assert made.speculation.take_figures()["speculation/discarded_drafts"] == 1
            assert made.dispatcher.in_flight == 0
            return generation.tokens

    async def undisturbed() -> list[int]:
        async with stage("none") as made:
            made.serve(1)
            return (await made.sample(1, 0)).generation.tokens

    assert asyncio.run(run()) == asyncio.run(undisturbed())
    assert "goes on without its draft" in caplog.text


def test_a_cancelled_request_leaves_no_slot_taken_wherever_it_stands():
    async def run() -> None:
        async with stage(siblings=False) as made:
            await made.epoch(0, 8)
            made.serve(1)
            stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def wait(body: dict[str, Any]) -> None:
                if ("logprob_start_len" in body) == scoring:
                    stopped.set_result("")
                    await asyncio.Event().wait()

            for scoring in (True, False):
                stopped = asyncio.get_running_loop().create_future()
                made.engine.before = wait
                task = asyncio.ensure_future(made.sample(1, int(scoring)))
                await stopped
                assert made.dispatcher.in_flight == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert made.dispatcher.in_flight == 0

    asyncio.run(run())
