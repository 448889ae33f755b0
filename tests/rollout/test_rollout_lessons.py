"""What breaks systems of this kind, as far as the scheduling of requests is concerned; each fault is injected."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_engine import LONG, STOP, go_on
from hypothesis import given, settings
from scene import Scene, rollout

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout import loop_lag
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.parts import Parts
from slimerl.samples.messages import HoldRequest, ReleaseRequest, unpack_array
from slimerl.samples.sample import Sample


def play(scene: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), rollout(**options) as made:
            for engine in made.engines:
                engine.answer = go_on
            await scene(made)

    asyncio.run(run())


async def sync(made: Scene, version: int) -> None:
    """New weights in mid-generation."""
    reply = await made.weights.hold(HoldRequest(version, 20.0))
    for engine in made.engines:
        engine.version = str(version)
    made.weights.release(ReleaseRequest(reply.lease_id, version, [engine.engine_id for engine in made.engines]))


def by_sample(made: Scene) -> dict[str, list[dict[str, Any]]]:
    """Requests of each sample, in the order of their parts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for request in sorted(
        (each for engine in made.engines for each in engine.requests), key=lambda r: len(r["input_ids"])
    ):
        found.setdefault(request["rid"].partition("#")[0].partition("+")[0], []).append(request)
    return found


def test_m1_a_request_is_answered_from_kv_of_its_own_weights_alone():
    """Fault: the engines are not flushed at the update, and keep the KV of older weights under the key of these."""

    async def scene(made: Scene) -> None:
        for version in range(3):
            before = [len(engine.requests) for engine in made.engines]
            await made.serve(version)
            made.scheduler.trained((await made.batch(version)).batch_id)
            sent = [each for engine, old in zip(made.engines, before, strict=True) for each in engine.requests[old:]]
            assert len(sent) == 6
            assert {request["extra_key"] for request in sent} == {f"version {version}"}

    play(scene)


def test_m6_an_engine_is_sent_again_token_for_token_what_engines_gave():
    """Fault: chunks, aborts and failures come between; ids such as these are no text that could be tokenised again."""

    async def scene(made: Scene) -> None:
        for engine in made.engines:
            engine.faults.extend(random.Random(3).choices(["", "", "500", "drop", "abort"], k=100))
        await made.serve(0)
        manifest = await made.batch(0)
        tokens = {
            one.sample_id: unpack_array(one.tokens, "int32").tolist()
            for one in made.store.payloads([sample.sample_id for sample in manifest.samples])
        }
        requests = by_sample(made)
        for sample_id, whole in tokens.items():
            sent = [request["input_ids"] for request in requests[sample_id]]
            assert len({len(each) for each in sent}) >= LONG // 4
            assert all(each == whole[: len(each)] for each in sent), "each input is the beginning of the sample"
            assert whole == [*whole[:2], *go_on(whole[:2], requests[sample_id][0]["sampling_params"]["sampling_seed"])]

    play(scene, chunk_tokens=4, max_new_tokens=LONG)


def test_m6_a_mask_never_changes_ids():
    sample = Sample("s", "g", "p", (5, 6))
    sample.append([7, 8], [-0.1, -0.2], 0)
    sample.append([9, 10, 11])
    sample.append([12], [-0.3], 1)
    ids = unpack_array(sample.payload().tokens, "int32").tolist()
    assert ids == sample.tokens == [5, 6, 7, 8, 9, 10, 11, 12]
    assert sample.sampled == [True, True, False, False, False, True]


@given(
    prompt=st.integers(1, 50),
    budget=st.integers(1, 60),
    chunk=st.one_of(st.none(), st.integers(1, 70)),
    cuts=st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_a7_parts_together_never_exceed_the_budget_nor_the_context(prompt, budget, chunk, cuts):
    """Fault: engines cut requests off anywhere, again and again."""
    parts = Parts(SamplingParams(budget, stop_token_ids=(STOP,)), 1, chunk)
    sample = Sample("g/0", "g", "p", tuple(range(100, 100 + prompt)))
    context = prompt + budget
    for tokens, cut in cuts:
        if parts.is_complete(sample):
            break
        request = parts.next_request(sample)
        assert 1 <= request.params.max_new_tokens <= (chunk or budget)
        assert len(request.tokens) + request.params.max_new_tokens <= context
        assert request.progress is not None
        assert request.progress.done + request.progress.left == budget
        count = min(tokens, request.params.max_new_tokens) if cut else request.params.max_new_tokens
        reason = "abort" if cut else "length"
        parts.append(sample, Generation([50] * count, [-0.5] * count, [0] * count, reason, {}, {}))
    assert len(sample.response_tokens) <= budget
    assert parts.is_complete(sample) == (len(sample.response_tokens) == budget)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a2_over_sampled_divided_rollouts_lose_and_double_nothing_over_twenty_updates(mode):
    """Fault: engines fail at random, some samples straggle, and new weights come in mid-generation each time."""

    async def scene(made: Scene) -> None:
        chance = random.Random(5)
        for number, engine in enumerate(made.engines):
            engine.delay_s = 0.002 * (1 + 2 * number)
            engine.faults.extend(chance.choices([*[""] * 60, "500", "drop", "abort"], k=3000))
        trained: set[str] = set()
        for version in range(21):
            await sync(made, version)
            manifest = await made.batch(version)
            names = {sample.sample_id for sample in manifest.samples}
            assert not names & trained, "no sample is trained twice"
            trained |= names
            for one in made.store.payloads(sorted(names)):
                response, versions = (
                    unpack_array(field, "int32").tolist()[skip:]
                    for field, skip in ((one.tokens, one.prompt_length), (one.versions, 0))
                )
                assert len(response) == len(versions) == LONG
                assert versions == sorted(versions)
                assert versions[0] >= version - 1, "as stale as may be and no staler"
            made.scheduler.trained(manifest.batch_id)
            made.store.check()
            assert made.scheduler.gate.accepted + made.scheduler.gate.running <= made.scheduler.gate.limit
        made.scheduler.stopped = "the test ends"
        await made.settled()
        counts = made.store.counts()
        assert counts.trained == len(trained)
        assert counts.admitted == counts.trained + counts.buffered + sum(counts.dropped.values())
        assert len(made.scheduler.dispatcher.order) == 0

    options = {"groups": 3, "size": 3, "staleness": 1, "capacity": 5, "chunk_tokens": 4, "max_new_tokens": LONG}
    play(scene, oversample=1.5, on_update=mode, **options)


def test_a8_a_loop_that_is_kept_busy_alarms(caplog, monkeypatch):
    """Fault: work of a fifth of a second on the event loop."""
    monkeypatch.setattr(loop_lag, "ALARM_S", 0.15)

    async def run() -> float:
        lag = LoopLag()
        watching = asyncio.ensure_future(lag.watch())
        await asyncio.sleep(0)
        time.sleep(0.25)
        await asyncio.sleep(0.06)
        watching.cancel()
        return lag.take_worst_s()

    assert asyncio.run(run()) > 0.15
    assert "the event loop was kept busy" in caplog.text
