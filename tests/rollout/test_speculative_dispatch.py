"""The dispatcher with drafts, in front of an engine whose policy is known: laws, log-probabilities, figures."""

import asyncio
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from policy_engine import STOP, TOKENS, Policy
from scipy import stats
from speculation_stage import LENGTH, NEW, OLD, PROMPT, Stage, log_law, request, stage

from slimerl.engine.protocol import Generation
from slimerl.rollout.speculation import rules
from slimerl.rollout.speculation.drafts_file import DraftsFile


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


@pytest.mark.parametrize("tier", ["exact", "lenient"])
def test_who_reads_along_is_told_what_comes_of_the_request_drafts_and_all(tier: str):
    """Token by token, with the log-probabilities that a rejection leaves."""

    async def run() -> None:
        async with stage(tier) as made:
            await made.epoch(0, 40)
            made.serve(1)
            engine_told = 0
            for number in range(40):
                told: list[Generation] = []
                asked = replace(request(1, number), told=told.append)
                whole = (await made.dispatcher.generate(asked)).generation
                assert [token for new in told for token in new.tokens] == whole.tokens[
                    : sum(len(n.tokens) for n in told)
                ]
                heard = [(t, p) for new in told for t, p in zip(new.tokens, new.logprobs, strict=True)]
                assert heard == list(zip(whole.tokens, whole.logprobs, strict=True))
                engine_told += any(len(new.tokens) == 1 for new in told)
            assert made.speculation is not None
            assert made.speculation.figures.accepted > 0
            assert engine_told > 0

    asyncio.run(run())
