"""The dispatcher with drafts, in front of an engine whose policy is known: laws, log-probabilities, faults."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from policy_engine import STOP, TOKENS, Policy, PolicyEngine, policy
from scipy import stats

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.prompts import sampling_seed
from slimerl.rollout.router import LeastLoaded
from slimerl.rollout.speculation import rules
from slimerl.rollout.speculation.dispatcher import Speculation, SpeculativeDispatcher
from slimerl.rollout.speculation.drafts_file import DraftsFile
from slimerl.samples.messages import EngineInfo
from slimerl.spec.speculation import SpeculationSpec

PROMPT = (5, 1, 4, 2, 3)
OLD, NEW = policy(1), 0.6 * policy(1) + 0.4 * policy(2)
LENGTH = 6
PARAMS = SamplingParams(LENGTH, stop_token_ids=(STOP,))


@dataclass
class Stage:
    engine: PolicyEngine
    dispatcher: Dispatcher
    speculation: Speculation | None = None

    async def sample(self, epoch: int, number: int, prompt: str = "p", **changes: Any) -> Completion:
        return await self.dispatcher.generate(request(epoch, number, prompt, **changes))

    async def epoch(self, epoch: int, count: int, prompt: str = "p") -> list[Completion]:
        return list(await asyncio.gather(*(self.sample(epoch, number, prompt) for number in range(count))))

    def serve(self, version: int) -> None:
        self.engine.version = version
        self.dispatcher.router.release(version, ["engine-0"], {})


def request(epoch: int, number: int, prompt: str = "p", **changes: Any) -> GenerateRequest:
    sample = f"{epoch}/{prompt}/{number}"
    params = replace(PARAMS, seed=sampling_seed(7, sample, 0), **changes)
    return GenerateRequest(sample, f"{epoch}/{prompt}", PROMPT, params, sample)


@asynccontextmanager
async def stage(tier: str = "exact", policies: tuple[Policy, ...] = (OLD, NEW), **options: Any) -> AsyncIterator[Stage]:
    """One engine that serves version 0."""
    engine = PolicyEngine(*policies)
    router = LeastLoaded(capacity=options.pop("capacity", 64))
    router.join(EngineInfo("engine-0", "", "", 1))
    router.release(0, ["engine-0"], {})
    engines = {"engine-0": engine}
    if tier == "none":
        made = Stage(engine, Dispatcher(router, engines, 10.0))
    else:
        file = options.pop("file", None)
        lenience = {"log_lenience": 0.5} if tier == "lenient" else {}
        spec = SpeculationSpec(tier=tier, **lenience, **options)
        speculation = Speculation(spec, 7, TOKENS, spec.log_lenience or 0.0, file)
        made = Stage(engine, SpeculativeDispatcher(router, engines, 10.0, speculation=speculation), speculation)
    async with asyncio.timeout(60):
        yield made
    await made.dispatcher.close()


def log_law(law: Policy, tokens: list[int]) -> list[float]:
    return [math.log(law[before, token]) for before, token in pairwise([PROMPT[-1], *tokens])]


def chi2_p(answers: list[list[int]], law: Policy) -> float:
    """Of the first two tokens of each answer; rare pairs together."""
    pairs = [(one, other) for one in range(TOKENS) if one != STOP for other in range(TOKENS)]
    chances = {(STOP,): law[PROMPT[-1], STOP]} | {pair: math.exp(sum(log_law(law, list(pair)))) for pair in pairs}
    seen = Counter(tuple(answer[:2]) for answer in answers)
    usual = [pair for pair, chance in chances.items() if chance * len(answers) >= 8]
    observed = np.array([seen[pair] for pair in usual])
    wanted = np.array([chances[pair] for pair in usual]) * len(answers)
    others = [len(answers) - observed.sum(), len(answers) - wanted.sum()]
    return float(stats.chisquare([*observed, others[0]], [*wanted, others[1]]).pvalue)


async def answered(made: Stage, count: int = 3000, usual: bool = False) -> list[list[int]]:
    """Of many prompts that differ in their noise alone, each with an answer of the older policy; `usual`: with its most
    likely one."""
    assert made.speculation is not None
    source = np.random.default_rng(3)
    for number in range(count):
        old = []
        while STOP not in old and len(old) < LENGTH:
            law = OLD[[*PROMPT, *old][-1]]
            old.append(int(law.argmax() if usual else source.choice(TOKENS, p=law)))
        logprobs, stopped = log_law(OLD, old), old[-1] == STOP
        group = f"0/p{number}"
        made.speculation.drafts.add(group, f"{group}/0", PROMPT, old, logprobs, version=0, stopped=stopped)
    made.serve(1)
    found = []
    for first in range(0, count, 50):  # fewer than the gate lets through
        for one in await asyncio.gather(*(made.sample(1, 0, f"p{number}") for number in range(first, first + 50))):
            generation = one.generation
            assert set(generation.versions) == {1}
            assert generation.logprobs == pytest.approx(log_law(NEW, generation.tokens), abs=1e-5)
            found.append(generation.tokens)
    return found


@pytest.mark.parametrize("residual", [True, False])
def test_tier_exact_gives_the_policys_law_and_log_probabilities_whatever_the_drafts_are(
    residual: bool, monkeypatch: pytest.MonkeyPatch
):
    """Injected: the bias that forbids the rejected token is left out of the request."""
    if not residual:
        monkeypatch.setattr("slimerl.rollout.speculation.dispatcher.NEVER", 0.0)
        monkeypatch.setattr(rules, "residual_logprob", lambda drawn, rejected: drawn)

    async def run() -> float:
        async with stage() as made:
            p = chi2_p(await answered(made, usual=True), NEW)
            assert made.speculation is not None
            figures = made.speculation.take_figures()
            assert figures["speculation/accepted_tokens"] > 500
            return p

    p = asyncio.run(run())
    assert (p > 0.001) == residual, p


def test_tier_coupled_gives_the_tokens_of_its_keys_whether_there_are_drafts_or_not():
    async def run(draft_tokens: int, runs: int) -> tuple[list[list[int]], dict[str, float]]:
        async with stage("coupled", draft_tokens=draft_tokens, max_running_requests=runs) as made:
            assert made.speculation is not None
            await made.epoch(0, 16)
            made.serve(1)
            made.speculation.take_figures()
            second = [one.generation.tokens for one in await made.epoch(1, 16)]
            return second, made.speculation.take_figures()

    with_drafts, figures = asyncio.run(run(64, 64))
    gated, none = asyncio.run(run(64, 1))
    assert with_drafts == gated
    assert figures["speculation/accepted_tokens"] > none["speculation/accepted_tokens"]
    assert figures["speculation/decoded_tokens"] < none["speculation/decoded_tokens"]
    assert none["speculation/gated_requests"] > 0


def test_tier_coupled_has_the_policys_law_while_the_policy_does_not_know_its_noise():
    async def run() -> float:
        async with stage("coupled") as made:
            return chi2_p(await answered(made), NEW)

    assert asyncio.run(run()) > 0.001


def test_tier_lenient_keeps_most_of_the_old_answers_is_biased_and_says_how_much():
    async def run() -> tuple[float, dict[str, float]]:
        async with stage("lenient") as made:
            p = chi2_p(await answered(made), NEW)
            assert made.speculation is not None
            return p, made.speculation.take_figures()

    p, figures = asyncio.run(run())
    assert p < 1e-6
    assert figures["speculation/accepted_fraction"] > 0.5
    assert figures["speculation/logprob_gap"] > 0.05
    assert 0.01 < figures["speculation/bias_estimate"] < rules.total_variation(OLD, NEW)


def test_without_an_older_answer_tier_lenient_sends_requests_as_they_came():
    async def run() -> None:
        async with stage("lenient") as made:
            await made.epoch(0, 8)
            assert not made.engine.scored

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "urgent"),
    [({"temperature": 0.5}, False), ({"top_p": 0.9}, False), ({"extra": {"top_k": 5}}, False), ({}, True)],
)
def test_what_engines_cannot_score_and_evaluations_go_out_as_they_came(changes: dict[str, Any], urgent: bool):
    async def run() -> None:
        async with stage() as made:
            await made.epoch(0, 4)
            made.engine.requests.clear()
            wanted = request(1, 0, **changes)
            await made.dispatcher.generate(wanted, urgent=urgent)
            (body,) = made.engine.requests
            assert body["sampling_params"] == wanted.params.wire()
            assert tuple(body["input_ids"]) == PROMPT

    asyncio.run(run())


@pytest.mark.parametrize("group", ["", "session-7", "a/b"])
def test_a_request_that_is_for_no_sample_of_a_prompt_goes_out_as_it_came(group: str):
    async def run() -> None:
        async with stage() as made:
            for session in ("one", "other"):
                await made.dispatcher.generate(replace(request(0, 0), group=group, session=session))
            assert not made.engine.scored
            assert len(made.engine.decoded) == 2

    asyncio.run(run())


def test_a_run_with_drafts_from_earlier_steps_alone_draws_the_same_again_however_it_is_batched():
    async def run(capacity: int) -> list[list[int]]:
        async with stage(siblings=False, capacity=capacity) as made:
            await made.epoch(0, 16)
            made.serve(1)
            return [one.generation.tokens for one in await made.epoch(1, 16)]

    one, other = asyncio.run(run(1)), asyncio.run(run(64))
    assert one == other


def test_c1_a_run_that_goes_on_in_another_process_draws_the_same(tmp_path):
    async def run(restart: bool) -> tuple[list[list[int]], float]:
        file = DraftsFile(tmp_path, keep=2)
        async with stage(siblings=False, file=file) as made:
            assert made.speculation is not None
            await made.epoch(0, 16)
            await made.speculation.save(step=1)
            if not restart:
                made.serve(1)
                return await second(made)
        async with stage(siblings=False, file=file) as made:
            assert made.speculation is not None
            await made.speculation.restore(step=1)
            made.serve(1)
            return await second(made)

    async def second(made: Stage) -> tuple[list[list[int]], float]:
        assert made.speculation is not None
        made.speculation.take_figures()
        tokens = [one.generation.tokens for one in await made.epoch(1, 16)]
        return tokens, made.speculation.take_figures()["speculation/accepted_tokens"]

    at_once, restarted = asyncio.run(run(False)), asyncio.run(run(True))
    assert at_once == restarted
    assert restarted[1] > 0


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


def test_a7_drafts_stay_within_what_a_request_may_generate():
    async def run() -> None:
        async with stage("lenient") as made:
            assert made.speculation is not None
            await made.epoch(0, 16)
            made.serve(1)
            for number in range(16):
                generation = (await made.sample(1, number, max_new_tokens=2)).generation
                assert len(generation.tokens) <= 2
                assert generation.finish_reason == ("stop" if generation.tokens[-1] == STOP else "length")
                assert STOP not in generation.tokens[:-1]

    asyncio.run(run())


def test_an_answer_that_is_kept_to_its_end_is_not_decoded_at_all():
    async def run() -> None:
        async with stage("lenient", policies=(OLD, OLD)) as made:
            assert made.speculation is not None
            first = await made.epoch(0, 16)
            made.serve(1)
            made.engine.requests.clear()
            second = await made.epoch(1, 16)
            assert [one.generation.tokens for one in second] == [one.generation.tokens for one in first]
            assert [one.generation.finish_reason for one in second] == [one.generation.finish_reason for one in first]
            assert not made.engine.decoded
            figures = made.speculation.take_figures()
            assert figures["speculation/accepted_tokens"] == sum(len(one.generation.tokens) for one in second)

    asyncio.run(run())


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


def test_the_figures_count_every_token_once_and_begin_anew_with_each_batch():
    async def run() -> None:
        async with stage() as made:
            assert made.speculation is not None
            await made.epoch(0, 8)
            made.serve(1)
            made.speculation.take_figures()
            answers = await made.epoch(1, 32)
            figures = made.speculation.take_figures()
            generated = sum(len(one.generation.tokens) for one in answers)
            assert figures["speculation/accepted_tokens"] + figures["speculation/decoded_tokens"] == generated
            assert figures["speculation/requests"] == 32
            assert figures["speculation/drafted_tokens"] >= figures["speculation/accepted_tokens"] > 0
            assert figures["speculation/prefilled_tokens"] > 0
            assert figures["speculation/seconds"] > 0
            assert np.mean(list(made.speculation.take_figures().values())) == 0

    asyncio.run(run())
