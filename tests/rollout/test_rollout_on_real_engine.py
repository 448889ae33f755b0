"""The rollout on a real SGLang server: what the fake engine stands in for elsewhere."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import zip_longest
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from engine_fixtures import Engines, RunningEngine
from scene import Scene, rollout, serve_the_same_weights

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.samples.messages import BatchManifest, HoldRequest, ReleaseRequest, unpack_array

Tokens = dict[str, list[int]]


def play(engine: RunningEngine, scene: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    """A rollout whose only engine is the real one, serving version 0."""

    async def run() -> None:
        async with asyncio.timeout(120), rollout(engines=0, request_s=60.0, **options) as made:
            made.service.clients.add(engine.info)
            made.router.join(engine.info)
            client = made.service.clients[engine.info.engine_id]
            await client.begin_weight_update()
            await client.end_weight_update(0)
            made.router.release(0, [engine.info.engine_id], {})
            made.scheduler.advance(0)
            await scene(made)

    asyncio.run(run())


def test_a_replayed_batch_draws_the_same_tokens_however_it_is_batched(engines: Engines):
    """Fault: one request at a time in one run, twelve at once in the other."""
    drawn: list[Tokens] = []
    logprobs: list[np.ndarray] = []

    async def scene(made: Scene) -> None:
        manifest = await made.batch(1, timeout_s=60.0)
        payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
        drawn.append({payload.sample_id: unpack_array(payload.tokens, "int32").tolist() for payload in payloads})
        logprobs.append(np.concatenate([unpack_array(payload.behavior_logprobs, "float32") for payload in payloads]))
        assert {sample.oldest_version for sample in manifest.samples} == {0}
        assert {sample.finish_reason for sample in manifest.samples} <= {"stop", "length"}
        assert manifest.metrics["rollout/retries"] == 0

    engine = engines("qwen3")
    for capacity in (1, 64):
        play(engine, scene, groups=2, size=6, capacity=capacity, max_new_tokens=12)
    assert drawn[0] == drawn[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert (logprobs[0] < 0).all()
    assert len({tuple(tokens[2:]) for tokens in drawn[0].values()}) > 8, "siblings draw with seeds of their own"


def tokens_and_versions(made: Scene, manifest: BatchManifest) -> tuple[Tokens, Tokens]:
    payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
    tokens, versions = (
        {one.sample_id: unpack_array(getattr(one, name), "int32").tolist() for one in payloads}
        for name in ("tokens", "versions")
    )
    return tokens, versions


def undisturbed(engine: RunningEngine, **options: Any) -> Tokens:
    found: list[Tokens] = []

    async def scene(made: Scene) -> None:
        found.append(tokens_and_versions(made, await made.batch(1, timeout_s=60.0))[0])

    play(engine, scene, **options)
    return found[0]


def first_differences(tokens: Tokens, expected: Tokens, versions: Tokens) -> dict[str, tuple[int, list, list, list]]:
    """By sample: where, both parts from there on, and the versions of all tokens."""
    found = {}
    for name, wanted in expected.items():
        if tokens[name] != wanted:
            at = next(i for i, pair in enumerate(zip_longest(tokens[name], wanted)) if pair[0] != pair[1])
            around = slice(max(0, at - 2), at + 3)
            found[name] = at, tokens[name][around], wanted[around], versions[name]
    return found


def cached_fraction(engine: RunningEngine, **options: Any) -> float:
    found: list[float] = []

    async def scene(made: Scene) -> None:
        manifest = await made.batch(1, timeout_s=60.0)
        found.append(manifest.metrics["rollout/cached_prompt_fraction"])

    play(engine, scene, **options)
    return found[0]


def test_m1_kv_of_older_weights_is_found_by_nobody_though_no_cache_was_flushed(engines: Engines):
    """Fault: no flush between the versions. The key is the one that the dispatcher sends with each request."""
    prompt = tuple(range(5, 133))

    async def cached(client: Any, version: int) -> int:
        key = {"extra_key": f"version {version}"}
        return (await client.generate(prompt, SamplingParams(2), extra=key)).cached_tokens

    async def ask(client: Any) -> list[int]:
        return [await cached(client, version) for version in (70, 70, 71, 71)]

    first, again, newer, newer_again = engines("qwen3").ask(ask)
    assert (first, newer) == (0, 0)
    assert again == newer_again > 100


def test_a3_a_request_that_waits_for_kv_comes_back_at_once_with_nothing_and_the_others_end(engines: Engines):
    """What is taken back from a crowded engine: twenty requests, of which its KV holds thirteen."""

    async def ask(client: Any) -> tuple[Generation, list[Generation]]:
        tasks = [
            asyncio.ensure_future(
                client.generate(
                    [5 + (31 * number + 7 * at) % 90 for at in range(1500)],
                    SamplingParams(60 if number else 2, seed=number),
                    request_id=f"crowd-{number}",
                )
            )
            for number in range(20)
        ]
        await tasks[0]  # it ends long before the twelve beside it, and makes room for one
        await client.abort("crowd-19")
        async with asyncio.timeout(10):
            last = await tasks[19]
        assert not all(task.done() for task in tasks), "it did not wait for its turn"
        return last, await asyncio.gather(*tasks[:19])

    last, others = engines("qwen3").ask(ask, timeout_s=120.0)
    assert (last.finish_reason, last.tokens) == ("abort", [])
    assert {each.finish_reason for each in others} <= {"length", "stop"}
    assert all(each.tokens for each in others)


LONG = {"groups": 2, "size": 4, "max_new_tokens": 120}


def test_a4_samples_generated_in_chunks_are_those_of_one_request_each(engines: Engines):
    engine = engines("qwen3")
    whole = undisturbed(engine, **LONG)
    assert undisturbed(engine, chunk_tokens=25, **LONG) == whole
    assert max(map(len, whole.values())) > 100


def test_a_chunk_goes_on_where_the_kv_of_those_before_it_is(engines: Engines):
    """Of two, 27, 52, 77 and 102 tokens that a sample is sent with, those of the chunks before are there."""
    assert cached_fraction(engines("qwen3"), chunk_tokens=25, **LONG) > 0.9


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a4_new_weights_in_mid_generation_lose_and_double_nothing(engines: Engines, mode: str):
    """Injected: twenty updates. The weights stay the same, so that the tokens must, too."""
    engine = engines("qwen3")
    expected = undisturbed(engine, **LONG)

    async def scene(made: Scene) -> None:
        for version in range(1, 21):
            # while it gets its two tokens, those that run beside it get theirs
            await made.service.clients[engine.info.engine_id].generate([5, 6], SamplingParams(2))
            reply = await made.weights.hold(HoldRequest(version, 60.0))
            await asyncio.to_thread(serve_the_same_weights, reply, version)
            made.weights.release(ReleaseRequest(reply.lease_id, version, [engine.info.engine_id]))
        manifest = await made.batch(1, timeout_s=60.0)
        tokens, versions = tokens_and_versions(made, manifest)
        assert first_differences(tokens, expected, versions) == {}
        assert made.store.counts().dropped == {}
        for of_sample in versions.values():
            assert of_sample == sorted(of_sample)
        assert fmean(len(set(of_sample)) for of_sample in versions.values()) > 8, "the updates came in between"

    play(engine, scene, on_update=mode, **LONG)


def test_a6_samples_cancelled_on_a_real_engine_are_replaced_and_leave_it_free(engines: Engines):
    """Fault: every running request is cancelled half-way."""

    async def scene(made: Scene) -> None:
        await made.until(lambda: made.scheduler.dispatcher.in_flight == 6)
        tasks = list(made.scheduler._tasks.values())
        for task in tasks:
            task.cancel()
        await made.until(lambda: made.store.counts().dropped.get("cancelled", 0) == len(tasks))
        manifest = await made.batch(1, timeout_s=60.0)
        assert len(manifest.samples) == 6
        assert made.scheduler.dispatcher.in_flight == 0

    play(engines("qwen3"), scene, groups=2, size=3, max_new_tokens=300)
