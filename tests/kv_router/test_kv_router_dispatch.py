"""The KV-aware router behind the real dispatcher: it stands behind the same interface as `LeastLoaded`."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence

from router_fixtures import prompt, serving

from slimerl.engine.client import EngineUnreachable
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.kv_router import KvRouter
from slimerl.samples.messages import EngineState


class InstantEngine:
    """Answers at the next turn of the event loop, with tokens of the version that it holds; `broken`: never."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.version = 0
        self.broken = False

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float, extra: object
    ) -> Generation:
        await asyncio.sleep(0)
        if self.broken:
            raise EngineUnreachable(self.engine_id, "/generate", "connection refused")
        count = params.max_new_tokens
        return Generation([1] * count, [-0.5] * count, [self.version] * count, "length", {}, {})

    async def healthy(self, *, timeout_s: float | None) -> bool:
        return not self.broken

    async def weight_version(self, *, timeout_s: float | None) -> int:
        return self.version

    async def continue_generation(self, *, timeout_s: float | None) -> None:
        pass

    async def close(self) -> None:
        pass


def dispatcher(router: KvRouter) -> tuple[Dispatcher, dict[str, InstantEngine]]:
    engines = {info.engine_id: InstantEngine(info.engine_id) for info in router.engines()}
    return Dispatcher(router, engines, request_s=5.0), engines


async def generate(dispatch: Dispatcher, groups: int, first: int = 0) -> list[tuple[str, Completion]]:
    requests = [
        GenerateRequest(f"{group}.{n}", f"g{group}", prompt(group, 1024), SamplingParams(8))
        for group in range(first, first + groups)
        for n in range(8)
    ]
    answers = await asyncio.gather(*(dispatch.generate(request) for request in requests))
    return [(request.group, answer) for request, answer in zip(requests, answers, strict=True)]


def test_siblings_meet_and_groups_spread_through_the_dispatcher() -> None:
    router = serving(4)
    dispatch, _ = dispatcher(router)
    answers = asyncio.run(generate(dispatch, groups=4))
    engines = defaultdict(set)
    for group, answer in answers:
        engines[group].add(answer.engine_id)
    assert all(len(used) <= 2 for used in engines.values())
    assert len(Counter(answer.engine_id for _, answer in answers)) == 4
    assert router.running() == []


def test_requests_of_an_engine_that_fails_go_elsewhere_and_it_is_taken_out_of_service() -> None:
    router = serving(3)
    dispatch, engines = dispatcher(router)
    engines["e1"].broken = True

    async def scene() -> list[tuple[str, Completion]]:
        answers = await generate(dispatch, groups=6)
        await dispatch.close()
        return answers

    answers = asyncio.run(scene())
    assert {answer.engine_id for _, answer in answers} == {"e0", "e2"}
    assert router.engine("e1").state is EngineState.DEAD
    assert router.running() == []


def test_a_weight_update_between_batches_is_served_under_the_new_version() -> None:
    router = serving(2)
    dispatch, engines = dispatcher(router)

    async def scene() -> list[tuple[str, Completion]]:
        await generate(dispatch, groups=3)
        await dispatch.drain(5.0)
        for engine in engines.values():
            engine.version = 1
        router.release(1, list(engines), {})
        dispatch.resume()
        return await generate(dispatch, groups=3)

    answers = asyncio.run(scene())
    assert {version for _, answer in answers for version in answer.generation.versions} == {1}
    assert router.running() == []
