"""Conversations on two real SGLang servers, with new weights in the middle of them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any

import pytest
from engine_fixtures import Engines, RunningEngine
from scene import Scene, rollout, serve_the_same_weights

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.agents.turns import turns_of
from slimerl.rollout.prompts import Prompt
from slimerl.samples.messages import HoldRequest, ReleaseRequest, unpack_array
from slimerl.samples.sample import OBSERVED_VERSION, Sample

TURNS, SAID = 3, 30
UPDATES = {"retract": 20, "in_place": 20, "abort": 6}
"""An engine looks for aborted requests once a second."""


async def answered(policy: Policy, sample: Sample, prompt: Prompt) -> None:
    """After each turn a tool counts what was said, and says some of it again."""
    while True:
        await policy.turn(max_tokens=SAID)
        said = turns_of(sample)[-1].sampled
        if len(turns_of(sample)) == TURNS or not policy.observe([5 + sum(said) % 7, *said[:2]]):
            return


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[list[RunningEngine]]:
    with engines.brief(("qwen3", 1), ("qwen3", 1)) as started:
        yield started


def play(pair: list[RunningEngine], scene: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        sizes = {"groups": 2, "size": 4, "max_new_tokens": 120}
        async with asyncio.timeout(120), rollout(engines=0, request_s=60.0, agent=answered, **sizes, **options) as made:
            for engine in pair:
                made.service.clients.add(engine.info)
                made.router.join(engine.info)
                await made.service.clients[engine.info.engine_id].begin_weight_update()
                await made.service.clients[engine.info.engine_id].end_weight_update(0)
            made.router.release(0, [engine.info.engine_id for engine in pair], {})
            made.scheduler.advance(0)
            await scene(made)

    asyncio.run(run())


async def samples_of(made: Scene) -> dict[str, dict[str, list[int]]]:
    manifest = await made.batch(1, timeout_s=60.0)
    payloads = made.store.payloads([sample.sample_id for sample in manifest.samples])
    kinds = {"tokens": "int32", "sampled": "uint8", "versions": "int32"}
    return {
        one.sample_id: {name: unpack_array(getattr(one, name), kind).tolist() for name, kind in kinds.items()}
        for one in payloads
    }


@pytest.fixture(scope="module")
def undisturbed(pair: list[RunningEngine]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}

    async def scene(made: Scene) -> None:
        found.update({name: sample["tokens"] for name, sample in (await samples_of(made)).items()})

    play(pair, scene)
    return found


@pytest.mark.parametrize("mode", UPDATES)
def test_a4_new_weights_in_the_middle_of_conversations_lose_and_double_nothing(pair, undisturbed, mode):
    """Injected: updates of both engines. The weights stay the same, so that the tokens must, too."""

    async def scene(made: Scene) -> None:
        sent: dict[str, list[tuple[int, ...]]] = {}
        generate = made.scheduler.dispatcher.generate

        async def recorded(request: Any, *others: Any, **named: Any) -> Any:
            sent.setdefault(request.session, []).append(request.tokens)
            return await generate(request, *others, **named)

        made.scheduler.dispatcher.generate = recorded  # type: ignore[method-assign]
        for version in range(1, UPDATES[mode] + 1):
            # while it gets its two tokens, those that run beside it get theirs
            await made.service.clients[pair[0].info.engine_id].generate([5, 6], SamplingParams(2))
            reply = await made.weights.hold(HoldRequest(version, 60.0))
            await asyncio.to_thread(serve_the_same_weights, reply, version)
            whole = [engine.info.engine_id for engine in pair]
            made.weights.release(ReleaseRequest(reply.lease_id, version, whole))
        samples = await samples_of(made)
        assert made.store.counts().dropped == {}
        assert {name: sample["tokens"] for name, sample in samples.items()} == undisturbed
        spans = set()
        for name, sample in samples.items():
            of_policy = [version for version in sample["versions"] if version != OBSERVED_VERSION]
            assert of_policy == sorted(of_policy)
            spans |= set(of_policy)
            observed = [version == OBSERVED_VERSION for version in sample["versions"]]
            assert observed == [not sampled for sampled in sample["sampled"]]
            for before, after in pairwise([*sent[name], tuple(sample["tokens"])]):
                assert after[: len(before)] == before
        assert len(spans) > UPDATES[mode] / 3, "the updates came in between"

    play(pair, scene, on_update=mode)


def test_conversations_use_both_engines_and_have_all_their_turns(pair, undisturbed):
    async def scene(made: Scene) -> None:
        used = set()
        reserve = made.router.reserve

        def noted(engine_id: str, query: Any) -> Any:
            used.add(engine_id)
            return reserve(engine_id, query)

        made.router.reserve = noted  # type: ignore[method-assign]
        samples = await samples_of(made)
        assert used == {engine.info.engine_id for engine in pair}
        assert {name: sample["tokens"] for name, sample in samples.items()} == undisturbed
        assert all(sample["sampled"].count(0) == 3 * (TURNS - 1) for sample in samples.values())

    play(pair, scene)
