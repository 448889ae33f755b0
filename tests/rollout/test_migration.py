"""Requests that wait in a crowded engine move to one that runs dry; what runs moves when its chunk ends."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from slimerl.engine.client import EngineTimeout
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.order import Progress
from slimerl.rollout.router import Query
from slimerl.samples.messages import EngineInfo

SLOTS = 8


class SlottedEngine:
    """Runs `slots` requests, token by token as `tick` is called; the others wait. Its tokens are their positions."""

    def __init__(self, engine_id: str, slots: int = SLOTS) -> None:
        self.engine_id = engine_id
        self.slots = slots
        self.deaf = False
        """Aborts fail."""
        self.held: dict[str, tuple[int, int, list[int], asyncio.Event]] = {}
        """Request → prompt length, budget, tokens so far, ended."""
        self.aborted: list[str] = []
        self.received: list[tuple[str, int]] = []

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        timeout_s: float | None,
        extra: Mapping[str, Any] | None,
    ) -> Generation:
        assert request_id is not None
        tokens: list[int] = []
        ended = asyncio.Event()
        self.received.append((request_id, len(input_ids)))
        self.held[request_id] = (len(input_ids), params.max_new_tokens, tokens, ended)
        await ended.wait()
        reason = "length" if len(tokens) == params.max_new_tokens else "abort"
        return Generation(tokens, [-0.5] * len(tokens), [0] * len(tokens), reason, {}, {})

    def tick(self, tokens: int = 1) -> None:
        for name in list(self.held)[: self.slots]:
            start, budget, made, ended = self.held[name]
            made.extend(range(start + len(made), start + min(budget, len(made) + tokens)))
            if len(made) == budget:
                del self.held[name]
                ended.set()

    async def abort(self, request_id: str | None, *, timeout_s: float | None) -> None:
        if self.deaf:
            raise EngineTimeout(self.engine_id, "/abort_request", "no answer")
        assert request_id is not None
        self.aborted.append(request_id)
        if request_id in self.held:
            self.held.pop(request_id)[3].set()

    async def healthy(self, *, timeout_s: float | None) -> bool:
        return True

    async def weight_version(self, *, timeout_s: float | None) -> int:
        return 0

    async def continue_generation(self, *, timeout_s: float | None) -> None:
        pass

    async def close(self) -> None:
        pass


Play = Callable[[Dispatcher, list[SlottedEngine]], Coroutine[Any, Any, None]]


def play(scene: Play, engines: int = 2, capacity: int = 100) -> None:
    async def run() -> None:
        router = KvRouter(capacity, 1, EngineModel(slots=SLOTS))
        fakes = [SlottedEngine(f"e{number}") for number in range(engines)]
        for fake in fakes:
            router.join(EngineInfo(fake.engine_id, "http://x", "key", 1))
        router.release(0, [fake.engine_id for fake in fakes], {})
        dispatcher = Dispatcher(router, {fake.engine_id: fake for fake in fakes}, request_s=5.0)
        async with asyncio.timeout(10):
            await scene(dispatcher, fakes)
            assert router.running() == [], "a slot was leaked"
            await dispatcher.close()

    asyncio.run(run())


def request(number: int, budget: int = 4, divisible: bool = True) -> GenerateRequest:
    progress = Progress("p", 0, budget) if divisible else None
    return GenerateRequest(f"r{number}", "", (1, 2, number), SamplingParams(budget), progress=progress)


async def crowd(
    dispatcher: Dispatcher, engines: list[SlottedEngine], count: int, divisible: bool = True
) -> "list[asyncio.Task[Completion]]":
    """So many requests on the first engine, of which eight run."""
    for engine in engines[1:]:
        dispatcher.router.quarantine(engine.engine_id, "test")
    tasks = [asyncio.ensure_future(dispatcher.generate(request(number, 4, divisible))) for number in range(count)]
    while len(engines[0].held) < count:
        await asyncio.sleep(0)
    dispatcher.router.release(0, [engine.engine_id for engine in engines], {})
    return tasks


async def one_ends_elsewhere(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
    """A request comes to its end on the second engine, which has room; that is when the loads are looked at."""
    early = asyncio.ensure_future(dispatcher.generate(request(99, 1)))
    while not early.done():
        engines[1].tick()
        await asyncio.sleep(0)
    assert early.result().engine_id == "e1"


async def finish(engines: list[SlottedEngine], tasks: "list[asyncio.Task[Completion]]") -> list[Completion]:
    while not all(task.done() for task in tasks):
        for engine in engines:
            engine.tick()
        await asyncio.sleep(0)
    return [task.result() for task in tasks]


def test_what_waits_in_a_crowded_engine_moves_to_one_that_runs_dry_and_what_runs_stays():
    async def scene(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
        tasks = await crowd(dispatcher, engines, 16)
        await one_ends_elsewhere(dispatcher, engines)
        answers = await finish(engines, tasks)
        assert [one.generation.tokens for one in answers] == [[3, 4, 5, 6]] * 16
        assert [one.generation.finish_reason for one in answers] == ["length"] * 16
        assert all(one.tries == 1 for one in answers), "a move is no failure"
        assert {one.engine_id for one in answers[:SLOTS]} == {"e0"}
        moved = [one for one in answers if one.engine_id == "e1"]
        assert dispatcher._migration.moved == len(moved) == len(engines[0].aborted) > 0

    play(scene)


def test_a_request_whose_sender_does_not_go_on_from_a_part_is_not_taken_back():
    async def scene(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
        tasks = await crowd(dispatcher, engines, 16, divisible=False)
        await one_ends_elsewhere(dispatcher, engines)
        answers = await finish(engines, tasks)
        assert {one.engine_id for one in answers} == {"e0"}
        assert dispatcher._migration.moved == 0

    play(scene)


def test_an_engine_that_runs_what_was_taken_for_waiting_gives_its_tokens_and_is_believed():
    """Fault: the engine has more slots than the router thinks."""

    async def scene(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
        engines[0].slots = 100
        tasks = await crowd(dispatcher, engines, 16)
        engines[0].tick(2)
        await asyncio.sleep(0)
        await one_ends_elsewhere(dispatcher, engines)
        answers = await finish(engines, tasks)
        cut = [one.generation for one in answers if one.generation.finish_reason == "abort"]
        assert {tuple(one.tokens) for one in cut} == {(3, 4, 5)}, "what it had when the abort came"
        assert len(cut) == dispatcher._migration.moved > 0
        again = await crowd(dispatcher, engines, 16)
        await one_ends_elsewhere(dispatcher, engines)
        await finish(engines, again)
        assert dispatcher._migration.moved == len(cut), "nothing more is taken back from it"

    play(scene)


def test_a3_an_engine_that_does_not_take_an_abort_is_named_and_answers_all_the_same(caplog):
    """Fault: aborts time out."""

    async def scene(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
        engines[0].deaf = True
        tasks = await crowd(dispatcher, engines, 16)
        await one_ends_elsewhere(dispatcher, engines)
        answers = await finish(engines, tasks)
        assert [one.generation.tokens for one in answers] == [[3, 4, 5, 6]] * 16
        assert "is not taken back, and stays on e0" in caplog.text

    play(scene)


def test_a6_requests_cancelled_while_they_are_taken_back_leak_nothing():
    """Fault: cancellation between the abort and the answer."""

    async def scene(dispatcher: Dispatcher, engines: list[SlottedEngine]) -> None:
        tasks = await crowd(dispatcher, engines, 16)
        await one_ends_elsewhere(dispatcher, engines)
        assert dispatcher._migration.moved
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize(
    ("loads", "expected", "goes"), [((9, 0), 4000, "e1"), ((9, 0), 1000, "e0"), ((3, 1), 4000, "e0")]
)
def test_a_sample_goes_on_elsewhere_when_its_chunk_ends_only_where_it_gains_its_prefill(loads, expected, goes):
    """Its tokens are cached on the first engine; the router charges their prefill on another."""
    router = KvRouter(100, 1, EngineModel(slots=16, step_per_request_s=1e-4))
    for number in range(2):
        router.join(EngineInfo(f"e{number}", "http://x", "key", 1))
    router.release(0, ["e0", "e1"], {})
    first = tuple(range(20_000))
    slot = router.reserve("e0", Query("s", "", first, expected))
    for number, load in enumerate(loads):
        for other in range(load):
            router.reserve(f"e{number}", Query(f"{number}.{other}", "", None, 10))
    router.end(slot, 256)
    assert router.route(Query("s", "", (*first, *range(256)), expected)) == goes
