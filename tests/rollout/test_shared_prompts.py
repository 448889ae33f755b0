"""Siblings that reach an engine together: their prompt is computed once, and nobody is lost or held up by it."""

import asyncio
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, hashed_tokens
from test_dispatch import play

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest
from slimerl.rollout.shared_prompts import MIN_SAVED_TOKENS

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
