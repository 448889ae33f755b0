"""Giving up memory and taking it back, with a real engine. Without CUDA nothing is freed; the rules are the same."""

import asyncio

import pytest
from engine_fixtures import RunningEngine

from slimerl.engine.client import EngineClient, EngineRefused
from slimerl.engine.protocol import Generation, MemoryTag, SamplingParams
from slimerl.resilience.deadline import Deadline

EVERYTHING = [MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]
LONG = SamplingParams(max_new_tokens=200, temperature=0.0, extra={"ignore_eos": True})


@pytest.fixture(scope="module")
def engine(engines) -> RunningEngine:
    return engines("qwen3")


async def holds_kv(client: EngineClient) -> bool:
    """A request that holds KV keeps the cache from being flushed."""
    try:
        await client.flush_cache()
    except EngineRefused:
        return True
    return False


def test_a_request_that_runs_while_memory_is_given_up_goes_on_afterwards(engine: RunningEngine) -> None:
    """SGLang's scheduler asserts that nothing runs, and would end: the client makes it so first."""

    async def turn(client: EngineClient) -> tuple[Generation, Generation]:
        whole = await client.generate([3, 1, 4], LONG)
        interrupted = asyncio.create_task(client.generate([3, 1, 4], LONG))
        deadline = Deadline("the request to run", 20)
        while not await holds_kv(client):
            deadline.check()
            await asyncio.sleep(0.01)
        await client.release_memory(EVERYTHING)
        assert not interrupted.done()
        await client.resume_memory([MemoryTag.WEIGHTS])
        await client.resume_memory([MemoryTag.KV_CACHE])
        await client.continue_generation()
        return whole, await interrupted

    whole, interrupted = engine.ask(turn, timeout_s=60)
    assert interrupted.tokens == whole.tokens
    assert interrupted.finish_reason == "length"
