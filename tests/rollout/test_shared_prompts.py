"""Siblings that reach an engine together: their prompt is computed once, and nobody is lost or held up by it."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from fake_engine import FakeEngine, hashed_tokens
from msgspec.structs import replace
from test_dispatch import play

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.router import Query, Reservation
from slimerl.rollout.shared_prompts import MIN_SAVED_TOKENS, SharedPrompts

PROMPT = tuple(range(3, 3 + MIN_SAVED_TOKENS // 2))
SIBLINGS = 8


def sibling(number: int, prompt: tuple[int, ...] = PROMPT, group: str = "g") -> GenerateRequest:
    return GenerateRequest(f"{group}{number}", group, prompt, SamplingParams(20, seed=number, stop_token_ids=(2,)))


def all_of_them(
    dispatcher: Dispatcher, request: Callable[[int], GenerateRequest] = sibling
) -> list["asyncio.Task[Completion]"]:
    return [asyncio.ensure_future(dispatcher.generate(request(number))) for number in range(SIBLINGS)]


async def came_out_right(tasks: list["asyncio.Task[Completion]"], prompt: tuple[int, ...] = PROMPT) -> None:
    for number, completion in enumerate(await asyncio.gather(*tasks)):
        assert completion.generation.tokens == hashed_tokens(prompt, number)


def asked_for(engine: FakeEngine) -> list[int]:
    return [request["sampling_params"]["max_new_tokens"] for request in engine.requests]


def test_one_has_the_prompt_computed_before_any_is_sent() -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        tasks = all_of_them(dispatcher)
        await engines[0].running_requests(1)
        assert asked_for(engines[0]) == [0]
        assert engines[0].requests[0]["input_ids"] == list(PROMPT)
        engines[0].open.set()
        await came_out_right(tasks)
        assert asked_for(engines[0]) == [0, *[20] * SIBLINGS]

    play(scene, engines=1)


def test_each_engine_computes_the_prompts_that_come_to_it() -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        other = PROMPT[::-1]
        tasks = all_of_them(dispatcher), all_of_them(dispatcher, lambda number: sibling(number, other, "h"))
        await came_out_right(tasks[0])
        await came_out_right(tasks[1], other)
        alone = [tuple(one["input_ids"]) for fake in engines for one in fake.requests if not asked_for_any(one)]
        assert sorted(alone) == sorted([PROMPT, other] * 2)

    play(scene)


def asked_for_any(body: dict) -> bool:
    return bool(body["sampling_params"]["max_new_tokens"])


@pytest.mark.parametrize(
    "request_of",
    [
        lambda number: sibling(number, PROMPT[:16]),
        lambda number: sibling(number, group=f"g{number}"),
        lambda number: sibling(number, (number, *PROMPT)),
    ],
    ids=["a short prompt", "groups of their own", "prompts of one length that differ"],
)
def test_those_that_have_little_to_share_are_sent_at_once(request_of: Callable[[int], GenerateRequest]) -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        await asyncio.gather(*all_of_them(dispatcher, request_of))
        assert asked_for(engines[0]) == [20] * SIBLINGS

    play(scene, engines=1)


@pytest.mark.parametrize(("caches", "shares"), [(1, True), (2, True), (SIBLINGS, False), (0, False)])
def test_prompts_are_computed_beforehand_only_where_siblings_find_them(caches: int, shares: bool) -> None:
    """An engine with data parallel attention has a cache for each group of its GPUs; another one may have none."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engine = engines[0]

        async def of_groups(names: list[str]) -> int:
            before = len(engine.requests)
            for name in names:
                for number in range(SIBLINGS):
                    hits = caches and not number % caches
                    engine.cached.append(len(PROMPT) - 1 if hits else 0)
                await came_out_right(all_of_them(dispatcher, lambda number, name=name: sibling(number, group=name)))
            return sum(not asked_for_any(one) for one in engine.requests[before:])

        assert await of_groups(["a", "b", "c"]) == (3 if shares else 1)
        assert await of_groups(["d"]) == shares
        dispatcher.hold()
        dispatcher.router.release(1, [engine.engine_id], {})
        engine.version = "1"
        dispatcher.resume()
        assert await of_groups(["e"]) == 1, "with new weights it is tried again"

    play(scene, engines=1)


def test_a_late_answer_by_older_weights_does_not_hide_what_is_known_of_the_present_ones() -> None:
    async def scene() -> None:
        prompts, numbers, computed = SharedPrompts(), count(), []

        async def compute() -> None:
            computed.append(1)

        async def of_group(version: int, cached: int) -> Callable[[], None]:
            slots = [Reservation(next(numbers), "engine-0", "") for _ in range(SIBLINGS)]
            for slot in slots:
                prompts.join(slot, version, Query("", "g", PROMPT))
            await asyncio.gather(*(prompts.computed(slot, compute) for slot in slots))
            answer = Generation([3], [-0.5], [version], "stop", {"cached_tokens": cached}, {})

            def answered() -> None:
                for slot in slots:
                    prompts.leave(slot, answer)

            return answered

        late = await of_group(0, len(PROMPT))
        (await of_group(1, 0))()
        late()
        assert len(computed) == 2
        (await of_group(1, 0))()
        assert len(computed) == 2, "siblings find nothing cached there"
        (await of_group(2, 0))()
        assert len(computed) == 3

    asyncio.run(scene())


@pytest.mark.parametrize("fault", ["500", "drop", "hang"])
def test_where_the_prompt_fails_all_get_their_tokens_nevertheless(fault: str) -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.append(fault)
        await came_out_right(all_of_them(dispatcher))

    play(scene, engines=1, request_s=0.5)


def test_whoever_has_it_computed_may_leave() -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        first, *others = all_of_them(dispatcher)
        await engines[0].running_requests(1)
        first.cancel()
        await engines[0].running_requests(SIBLINGS)  # the abandoned one still waits in the fake, beside the others
        engines[0].open.set()
        for number, completion in enumerate(await asyncio.gather(*others), 1):
            assert completion.generation.tokens == hashed_tokens(PROMPT, number)

    play(scene, engines=1)


def test_nothing_is_sent_behind_a_prompt_that_was_computed_while_dispatch_was_held() -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        tasks = all_of_them(dispatcher)
        await engines[0].running_requests(1)
        draining = asyncio.ensure_future(dispatcher.drain(10.0))
        await asyncio.sleep(0)
        engines[0].open.set()
        await draining
        assert asked_for(engines[0]) == [0]
        dispatcher.router.release(1, ["engine-0"], {})
        engines[0].version = "1"
        dispatcher.resume()
        await came_out_right(tasks)
        assert asked_for(engines[0]) == [0, 0, *[20] * SIBLINGS]

    play(scene, engines=1)


def test_siblings_of_an_engine_that_is_lost_meanwhile_go_to_another() -> None:
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        tasks = all_of_them(dispatcher)
        await engines[0].running_requests(1)
        dispatcher.router.leave("engine-0", "it is gone")
        dispatcher.interrupt("engine-0")
        await came_out_right(tasks)
        assert asked_for(engines[0]) == [0]
        engines[0].open.set()

    play(scene)


def test_what_was_told_is_not_repeated_where_the_prompt_of_the_rest_fails() -> None:
    """Fault: two siblings with the same tokens lose their engine in the middle, and whoever then has their prompt
    computed elsewhere fails at that."""

    prompt = PROMPT * 2

    def going_on(tokens: Sequence[int], seed: int) -> list[int]:
        return [3 + at for at in range(len(tokens) - len(prompt), 12)]

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        for fake in engines:
            fake.answer = going_on
        engines[0].streams_stop_at, engines[0].stream_fault = 4, "drop"
        engines[1].faults.append("500")
        dispatcher.router.leave("engine-1", "it comes later")
        told: list[list[int]] = [[], []]
        tasks = [
            asyncio.ensure_future(
                dispatcher.generate(
                    replace(sibling(number, prompt), told=lambda new, to=told[number]: to.extend(new.tokens))
                )
            )
            for number in range(2)
        ]
        while not all(len(one) == 4 for one in told):
            await asyncio.sleep(0.001)
        engines[0].streams_stop_at = None
        dispatcher.router.join(engines[1].info)
        dispatcher.router.release(0, ["engine-0", "engine-1"], {})
        for task, of_task in zip(tasks, told, strict=True):
            assert (await task).generation.tokens == of_task == going_on(prompt, 0)
        of_rest = [len(one["input_ids"]) for fake in engines for one in fake.requests if not asked_for_any(one)]
        assert of_rest == [len(prompt), len(prompt) + 4]

    play(scene)
