"""Speculative rollouts on a real SGLang server: its scores, its residual draws, its keyed noise."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from engine_fixtures import Engines, RunningEngine
from msgspec.structs import replace
from scene import SEED, Scene, rollout, serve_the_same_weights
from scipy import stats

from slimerl.engine.client import EngineClient
from slimerl.engine.protocol import SamplingParams, read_scores
from slimerl.rollout.dispatch import GenerateRequest
from slimerl.rollout.prompts import Prompt, sampling_seed
from slimerl.rollout.speculation.dispatcher import Speculation
from slimerl.samples.messages import BatchManifest, HoldRequest, ReleaseRequest, unpack_array
from slimerl.spec.speculation import SpeculationSpec

VOCABULARY = 512
PROMPT = (10, 11, 12, 13, 14, 15)
DRAWS = 1800


def speculation(tier: str, **options: Any) -> Speculation:
    return Speculation(SpeculationSpec(tier=tier, **options), SEED, VOCABULARY, log_lenience=0.5)


def play(engine: RunningEngine, scene: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    """A rollout whose only engine is the real one, serving version 0."""

    async def run() -> None:
        async with asyncio.timeout(120), rollout(engines=0, request_s=60.0, **options) as made:
            made.service.clients.add(engine.info)
            made.router.join(engine.info)
            await serve(made, engine, 0)
            await scene(made)

    asyncio.run(run())


async def serve(made: Scene, engine: RunningEngine, version: int) -> None:
    client = made.service.clients[engine.info.engine_id]
    await made.scheduler.dispatcher.drain(60.0)
    await client.begin_weight_update()
    await client.end_weight_update(version)
    made.router.release(version, [engine.info.engine_id], {})
    made.scheduler.dispatcher.resume()


async def law_behind(client: EngineClient, context: tuple[int, ...]) -> np.ndarray:
    """[vocabulary], probabilities: as the engine scores them."""
    params = SamplingParams(0, score_from=len(context), score_alternatives=VOCABULARY)
    generation = await client.generate([*context, 5], params)
    ((ids, logprobs),) = read_scores(generation, [5]).alternatives
    law = np.zeros(VOCABULARY)
    law[ids] = np.exp(logprobs)
    assert law.sum() == pytest.approx(1, abs=1e-4)
    return law


def chi2_p(answers: list[list[int]], first: np.ndarray, second: dict[int, np.ndarray]) -> float:
    """Of the first two tokens. `second`: law behind the usual first tokens. Rare second tokens count together behind
    each of these, rare first tokens together."""
    wanted: Counter[tuple[int, ...]] = Counter()
    bins: dict[tuple[int, int], tuple[int, ...]] = {}
    for token in range(VOCABULARY):
        behind = second.get(token, np.ones(1))
        for other, chance in enumerate(first[token] * behind * len(answers)):
            usual = (token, other) if chance >= 8 and token in second else (token,)
            bins[token, other] = usual if first[token] * len(answers) >= 8 else ()
            wanted[bins[token, other]] += chance
    seen = Counter(bins[answer[0], answer[1] if answer[0] in second else 0] for answer in answers)
    assert len(wanted) > 10
    return float(stats.chisquare([seen[key] for key in wanted], list(wanted.values()), sum_check=False).pvalue)


def request(number: int, prompt: tuple[int, ...]) -> GenerateRequest:
    sample = f"1/q{number}/0"
    params = SamplingParams(2, seed=sampling_seed(SEED, sample, 0))
    return GenerateRequest(sample, f"1/q{number}", prompt, params, sample)


async def most_certain(client: EngineClient) -> tuple[tuple[int, ...], np.ndarray]:
    """A prompt behind which few tokens have most of the probability, and their law: a random model is nearly uniform
    behind most, and a draft that is never kept would tell nothing."""
    prompts = [(*PROMPT, token) for token in range(4, 260)]
    laws = await asyncio.gather(*(law_behind(client, prompt) for prompt in prompts))
    best = max(range(len(laws)), key=lambda at: laws[at].max())
    return prompts[best], laws[best]


@pytest.mark.parametrize("tier", ["exact", "off"])
def test_tier_exact_has_the_law_of_the_engine_as_direct_sampling_has(engines: Engines, tier: str):
    """Every prompt has the most likely answer as its draft: where it is rejected, only the residual keeps the law."""
    drafts = speculation("exact", max_running_requests=64) if tier == "exact" else None

    async def scene(made: Scene) -> None:
        client = made.service.clients[engine.info.engine_id]
        prompt, first = await most_certain(client)
        usual = [int(token) for token in np.argsort(-first)[:3]]
        second = {token: await law_behind(client, (*prompt, token)) for token in usual}
        assert first[usual[0]] > 0.05
        draft = [usual[0], int(second[usual[0]].argmax())]
        if drafts is not None:
            for number in range(DRAWS):
                drafts.drafts.add(f"0/q{number}", f"0/q{number}/0", prompt, draft, [0.0, 0.0], -1, stopped=False)
        answers: list[list[int]] = []
        for start in range(0, DRAWS, 60):
            asked = (made.scheduler.dispatcher.generate(request(number, prompt)) for number in range(start, start + 60))
            for completion in await asyncio.gather(*asked):
                tokens, logprobs = completion.generation.tokens, completion.generation.logprobs
                answers.append(tokens)
                assert logprobs[0] == pytest.approx(math.log(first[tokens[0]]), abs=1e-4)
                if tokens[0] in second:
                    assert logprobs[1] == pytest.approx(math.log(second[tokens[0]][tokens[1]]), abs=1e-4)
        assert chi2_p(answers, first, second) > 0.001
        if drafts is not None:
            figures = drafts.take_figures()
            assert figures["speculation/drafted_tokens"] >= 2 * DRAWS
            assert figures["speculation/accepted_tokens"] > 0.5 * first[usual[0]] * DRAWS

    engine = engines("qwen3")
    play(engine, scene, groups=1, size=2, capacity=64, speculation=drafts, steps=1, max_new_tokens=1)


Batch = dict[str, tuple[list[int], list[float], list[int]]]
"""Sample → tokens (those of the prompt, too), log-probabilities, versions."""


def contents(made: Scene, manifest: BatchManifest) -> Batch:
    payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
    return {
        one.sample_id: (
            unpack_array(one.tokens, "int32").tolist(),
            unpack_array(one.behavior_logprobs, "float32").tolist(),
            unpack_array(one.versions, "int32").tolist(),
        )
        for one in payloads
    }


def two_epochs(engine: RunningEngine, spec: Speculation | None, **options: Any) -> tuple[Batch, dict[str, float]]:
    """The same prompts twice, under unchanged weights with a new version: samples of the second time."""
    found: list[tuple[Batch, dict[str, float]]] = []

    async def scene(made: Scene) -> None:
        stream = made.scheduler.prompts
        stream.prompts = [Prompt(f"p{number}", (10, number, 20, 21, 22), "") for number in range(2)]
        made.scheduler.advance(0)
        for step in (1, 2):
            manifest = await made.batch(step, timeout_s=60.0)
            batch = contents(made, manifest)
            made.scheduler.trained(manifest.batch_id)
            await serve(made, engine, step)
            made.scheduler.advance(step)
        assert {sample.newest_version for sample in manifest.samples} == {1}
        assert made.store.counts().dropped == {}
        found.append((batch, manifest.metrics))

    play(engine, scene, groups=2, size=4, max_new_tokens=24, steps=2, speculation=spec, **options)
    return found[0]


def test_tier_coupled_says_the_same_with_drafts_and_without_and_decodes_next_to_nothing(engines: Engines):
    """Unchanged weights: every token of the epoch before comes again."""
    engine = engines("qwen3")
    drafted, figures = two_epochs(engine, speculation("coupled"))
    alone, none = two_epochs(engine, speculation("coupled", draft_tokens=1, drafts_per_request=1))
    assert {name: one[0] for name, one in drafted.items()} == {name: one[0] for name, one in alone.items()}
    for name, (_, logprobs, _) in drafted.items():
        assert logprobs == pytest.approx(alone[name][1], abs=1e-4)
    assert figures["speculation/reused_fraction"] > 0.9
    assert none["speculation/reused_fraction"] < 0.2


def test_a_run_without_speculation_is_that_of_before_and_tier_exact_repeats_itself(engines: Engines):
    engine = engines("qwen3")
    plain, metrics = two_epochs(engine, None)
    assert not [name for name in metrics if name.startswith("speculation/")]
    runs = [two_epochs(engine, speculation("exact", siblings=False), capacity=capacity) for capacity in (64, 2)]
    assert runs[0][0].keys() == plain.keys()
    tokens = [{name: one[0] for name, one in batch.items()} for batch, _ in runs]
    assert tokens[0] == tokens[1]
    assert runs[0][1]["speculation/drafted_tokens"] > 0


def test_tier_lenient_keeps_the_old_answers_of_an_unchanged_policy(engines: Engines):
    engine = engines("qwen3")
    _, figures = two_epochs(engine, speculation("lenient"))
    assert figures["speculation/accepted_fraction"] > 0.99
    assert figures["speculation/logprob_gap"] < 1e-3
    assert figures["speculation/bias_estimate"] < 1e-3


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a4_new_weights_amid_drafts_lose_and_double_nothing(engines: Engines, mode: str):
    """Injected: six updates. The weights and the keys stay the same, so that the tokens must, too."""
    engine = engines("qwen3")
    sizes: dict[str, Any] = {"groups": 2, "size": 4, "max_new_tokens": 120, "chunk_tokens": 40, "on_update": mode}
    batches: list[Batch] = []
    accepted: list[float] = []

    async def scene(made: Scene) -> None:
        made.scheduler.advance(0)
        for version in range(1, 7) if batches else ():
            await made.service.clients[engine.info.engine_id].generate([5, 6], SamplingParams(2))
            reply = await made.weights.hold(HoldRequest(version, 60.0))
            await asyncio.to_thread(serve_the_same_weights, reply, version)
            made.weights.release(ReleaseRequest(reply.lease_id, version, [engine.info.engine_id]))
        manifest = await made.batch(1, timeout_s=60.0)
        assert made.store.counts().dropped == {}
        batches.append(contents(made, manifest))
        accepted.append(manifest.metrics["speculation/accepted_tokens"])
        assert all(versions == sorted(versions) for _, _, versions in batches[-1].values())

    play(engine, scene, speculation=speculation("coupled"), **sizes)
    drafts = speculation("coupled", draft_tokens=8)
    for sample, (tokens, logprobs, _) in batches[0].items():
        epoch, prompt, number = sample.split("/")
        old, context = f"{int(epoch) + 9}/{prompt}", tokens[: -len(logprobs)]
        drafts.drafts.add(old, f"{old}/{number}", context, tokens[len(context) :], logprobs, -1, stopped=False)
    play(engine, scene, speculation=drafts, **sizes)
    assert {name: one[0] for name, one in batches[1].items()} == {name: one[0] for name, one in batches[0].items()}
    for name, (_, logprobs, _) in batches[1].items():
        assert logprobs == pytest.approx(batches[0][name][1], abs=1e-4)
    assert len({version for _, _, versions in batches[1].values() for version in versions}) > 2
    assert accepted[1] > accepted[0] + 100


def test_a_score_is_what_the_same_token_was_drawn_with(engines: Engines):
    """Prefill against decode, and the place where scores begin."""

    async def ask(client: EngineClient) -> None:
        drawn = await client.generate(PROMPT, SamplingParams(12, seed=3))
        params = SamplingParams(0, score_from=len(PROMPT), score_alternatives=4)
        scored = await client.generate([*PROMPT, *drawn.tokens], params)
        scores = read_scores(scored, drawn.tokens)
        assert scored.tokens == []
        assert scores.logprobs == pytest.approx(drawn.logprobs, abs=1e-4)
        assert [len(ids) for ids, _ in scores.alternatives] == [4] * len(drawn.tokens)
        tempered = await client.generate([*PROMPT, *drawn.tokens], replace(params, temperature=0.5))
        assert read_scores(tempered, drawn.tokens).logprobs == pytest.approx(scores.logprobs, abs=1e-4)

    engines("qwen3").ask(ask)
