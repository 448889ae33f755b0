"""The rollout on a real SGLang server: what the fake engine stands in for elsewhere."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from engine_fixtures import Engines, RunningEngine
from scene import Scene, rollout

from slimerl.samples.messages import unpack_array

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
