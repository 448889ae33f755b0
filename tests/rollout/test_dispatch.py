"""Requests to engines: tried again elsewhere, never leaking a slot, never sent while held."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_engine import VOCABULARY, FakeEngine, go_on, hashed_tokens
from msgspec.structs import replace

from slimerl.engine.protocol import SamplingParams
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.rollout.dispatch import MAX_TRIES, Completion, Dispatcher, GenerateRequest, GenerationFailed
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.router import LeastLoaded
from slimerl.samples.messages import EngineState

Play = Callable[[Dispatcher, list[FakeEngine]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def dispatching(
    engines: int, capacity: int = 8, request_s: float = 10.0
) -> AsyncIterator[tuple[Dispatcher, list[FakeEngine]]]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine(f"engine-{number}")) for number in range(engines)]
        clients, router = EngineClients(request_s, VOCABULARY), LeastLoaded(capacity)
        dispatcher = Dispatcher(router, clients, request_s)
        for fake in fakes:
            fake.version = "0"
            clients.add(fake.info)
            router.join(fake.info)
        router.release(0, [fake.engine_id for fake in fakes], {})
        try:
            yield dispatcher, fakes
            assert router.running() == [], "a slot was leaked"
        finally:
            await dispatcher.close()
            await clients.close()


def play(scene: Play, engines: int = 2, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), dispatching(engines, **options) as (dispatcher, fakes):
            await scene(dispatcher, fakes)

    asyncio.run(run())


def request(number: int = 0, seed: int = 5) -> GenerateRequest:
    return GenerateRequest(f"r{number}", "g", (1, 2, number), SamplingParams(20, seed=seed, stop_token_ids=(2,)))


def expected(number: int = 0, seed: int = 5) -> list[int]:
    return hashed_tokens((1, 2, number), seed)


async def failure(dispatcher: Dispatcher) -> GenerationFailed:
    with pytest.raises(GenerationFailed) as caught:
        await dispatcher.generate(request())
    return caught.value


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "abort", "hang", "garbage"])
def test_a_request_that_an_engine_failed_is_tried_on_another_and_draws_the_same_tokens(fault):
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.append(fault)
        completion = await dispatcher.generate(request())
        assert (completion.engine_id, completion.tries) == ("engine-1", 2)
        assert completion.generation.tokens == expected()
        assert completion.generation.versions == [0] * len(expected())
        assert [one["sampling_params"]["sampling_seed"] for fake in engines for one in fake.requests] == [5, 5]

    play(scene, request_s=0.3)


def test_the_only_engine_is_asked_again_after_a_moment():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.extend(["drop", "500"])
        completion = await dispatcher.generate(request())
        assert (completion.engine_id, completion.tries) == ("engine-0", 3)

    play(scene, engines=1)


REASONS = [("500", "engine_error"), ("drop", "unreachable"), ("abort", "aborted"), ("garbage", "bad_answer")]


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_tries_are_bounded_and_the_last_failure_is_the_reason(fault, reason):
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        for fake in engines:
            fake.faults.extend([fault] * 10)
        assert (await failure(dispatcher)).reason == reason
        assert sum(len(fake.requests) for fake in engines) == MAX_TRIES
        assert dispatcher.take_figures()[f"rollout/tried_again_{reason}"] == MAX_TRIES - 1

    play(scene)


@pytest.mark.parametrize(("fault", "reason"), [("400", "refused"), ("empty", "empty")])
def test_what_cannot_succeed_is_not_tried_again(fault, reason):
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.append(fault)
        assert (await failure(dispatcher)).reason == reason
        assert sum(len(fake.requests) for fake in engines) == 1

    play(scene)


@pytest.mark.parametrize(("token", "logprob"), [(VOCABULARY, -0.5), (-1, -0.5), (2**40, -0.5), (7, 0.5), (7, -1e39)])
@pytest.mark.parametrize("streams", [False, True])
def test_tokens_and_log_probabilities_that_are_none_are_passed_on_to_nobody(token, logprob, streams):
    """Injected: an engine answers an id outside of the vocabulary, or what no probability has for a logarithm (the
    last is infinite in float32). A trainer that took it would end with an error, and every run that goes on there."""
    told: list[list[int]] = []

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].answer = lambda *_: [5, token, 2]
        engines[0].logprob = lambda each: logprob if each == token else -0.5
        asked = replace(request(), told=lambda new: told.append(new.tokens)) if streams else request()
        with pytest.raises(GenerationFailed, match="engine-0 /generate: /generate answered") as caught:
            await dispatcher.generate(asked)
        assert caught.value.reason == "bad_answer"
        assert told in ([], [[5]] * MAX_TRIES)

    play(scene, engines=1)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_answers_nonsense_costs_a_try_and_not_the_request(streams):
    """Injected: an id outside of the vocabulary, after tokens that were told already where they are streamed."""
    told: list[int] = []

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        whole = go_on((1, 7), 5)
        engines[0].answer = lambda *_: [*whole[:3], VOCABULARY, 2]
        engines[1].answer = go_on
        asked = GenerateRequest("r", "g", (1, 7), SamplingParams(12, seed=5))
        asked = replace(asked, told=lambda new: told.extend(new.tokens)) if streams else asked
        completion = await dispatcher.generate(asked)
        assert (completion.engine_id, completion.tries) == ("engine-1", 2)
        assert completion.generation.tokens == whole
        assert told == (whole if streams else [])
        assert dispatcher.take_figures()["rollout/tried_again_bad_answer"] == 1

    play(scene)


def test_a3_a_request_that_misses_its_deadline_is_aborted_on_its_engine():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.append("hang")
        await dispatcher.generate(request())
        assert engines[0].aborted == ["r0#1"]

    play(scene, request_s=0.2)


def test_no_request_waits_for_an_engine_that_is_taken_for_dead():
    """One hangs there, with more time than this test has, while others fail."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.extend(["hang", "500", "500", "500"])
        engines[0].healthy = False
        results = await asyncio.gather(*(dispatcher.generate(request(number)) for number in range(8)))
        assert [one.generation.tokens for one in results] == [expected(number) for number in range(8)]
        assert results[0].engine_id == "engine-1"
        assert dispatcher.router.engine("engine-0").state is EngineState.DEAD

    play(scene, request_s=60.0)


def test_an_engine_that_fails_and_is_not_healthy_is_taken_for_dead():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        await engines[0].stop()
        results = await asyncio.gather(*(dispatcher.generate(request(number)) for number in range(8)))
        assert {one.engine_id for one in results} == {"engine-1"}
        while dispatcher.router.engine("engine-0").state is not EngineState.DEAD:
            await asyncio.sleep(0.01)
        assert "requests in a row failed" in dispatcher.router.reasons()["engine-0"]

    play(scene)


def test_an_engine_that_fails_but_is_healthy_stays_in_service():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].faults.extend(["500"] * 4)
        await asyncio.gather(*(dispatcher.generate(request(number)) for number in range(8)))
        while engines[0].calls["/health"] == 0 or dispatcher._suspects.probes:
            await asyncio.sleep(0.01)
        assert dispatcher.router.engine("engine-0").state is EngineState.SERVING

    play(scene)


def test_m1_tokens_of_another_version_are_refused_and_their_engine_quarantined():
    """Fault: an engine holds other weights than the router believes."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].version = "3"
        completion = await dispatcher.generate(request())
        assert completion.engine_id == "engine-1"
        assert dispatcher.router.engine("engine-0").state is EngineState.DIRTY
        assert "version [3] where 0 is required" in dispatcher.router.reasons()["engine-0"]

    play(scene)


def test_no_engine_gets_more_requests_than_its_capacity():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        for fake in engines:
            fake.open.clear()
        tasks = [asyncio.ensure_future(dispatcher.generate(request(number))) for number in range(40)]
        for fake in engines:
            await fake.running_requests(3)
            fake.open.set()
        results = await asyncio.gather(*tasks)
        assert [one.generation.tokens for one in results] == [expected(number) for number in range(40)]
        assert [fake.most_running for fake in engines] == [3, 3]

    play(scene, capacity=3)


def test_urgent_requests_go_first():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        done: list[int] = []

        async def send(number: int, urgent: bool) -> None:
            await dispatcher.generate(request(number), urgent=urgent)
            done.append(number)

        tasks = [asyncio.ensure_future(send(number, urgent=number >= 4)) for number in range(6)]
        await engines[0].running_requests(1)
        engines[0].open.set()
        await asyncio.gather(*tasks)
        assert done == [0, 4, 5, 1, 2, 3]

    play(scene, engines=1, capacity=1)


def test_a6_a_request_cancelled_anywhere_gives_its_slot_back():
    """Fault: cancellation while waiting for a slot, while running, and between the grant and its arrival."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        running = asyncio.ensure_future(dispatcher.generate(request(0)))
        waiting = [asyncio.ensure_future(dispatcher.generate(request(number))) for number in (1, 2, 3)]
        await engines[0].running_requests(1)
        waiting[0].cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        # The slot went to the second one; cancelled before it could take a step.
        granted = [one for one in waiting[1:] if not one.done()]
        for one in granted:
            one.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in results)
        assert dispatcher.router.running() == []
        engines[0].open.set()
        assert (await dispatcher.generate(request(9))).generation.tokens == expected(9)

    play(scene, engines=1, capacity=1)


@pytest.mark.parametrize("gone_first", [True, False, None])
def test_a6_a_request_whose_engine_is_lost_goes_to_another_unless_its_caller_has_gone(gone_first):
    """Faults: the engine is taken out of service; before it, after it or not at all the caller is cancelled."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        asking = asyncio.ensure_future(dispatcher.generate(request()))
        await engines[0].running_requests(1)
        if gone_first:
            asking.cancel()
        dispatcher.router.quarantine("engine-0", "lost")
        dispatcher.interrupt("engine-0")
        dispatcher.interrupt("engine-0")
        if gone_first is False:
            asking.cancel()
        if gone_first is None:
            completion = await asking
            assert (completion.engine_id, completion.tries) == ("engine-1", 2)
        else:
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert asking.cancelling() == (gone_first is not None)
        assert engines[0].aborted == ["r0#1"]
        engines[0].open.set()

    play(scene)


def test_a6_a_grant_that_meets_a_cancellation_is_passed_on():
    """Fault: the slot is granted and its task cancelled in the same turn of the event loop."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        dispatcher._held = True
        first, second = (asyncio.ensure_future(dispatcher.generate(request(number))) for number in (1, 2))
        await asyncio.sleep(0)
        dispatcher.resume()
        first.cancel()
        assert (await second).generation.tokens == expected(2)
        with pytest.raises(asyncio.CancelledError):
            await first

    play(scene, engines=1, capacity=1)


def test_a4_nothing_is_sent_while_dispatch_is_held():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        running = asyncio.ensure_future(dispatcher.generate(request(0)))
        await engines[0].running_requests(1)
        holding = asyncio.ensure_future(dispatcher.drain(10.0))
        later = asyncio.ensure_future(dispatcher.generate(request(1)))
        await asyncio.sleep(0.01)
        assert not holding.done()
        engines[0].open.set()
        await holding
        assert running.done()
        assert len(engines[0].requests) == 1
        dispatcher.resume()
        assert (await later).generation.tokens == expected(1)

    play(scene, engines=1)


def test_a3_a_hold_that_misses_its_deadline_names_the_requests_and_lets_dispatch_go_on():
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        engines[0].open.clear()
        running = asyncio.ensure_future(dispatcher.generate(request(0)))
        await engines[0].running_requests(1)
        with pytest.raises(DeadlineExceeded, match=r"1 requests to end .*: r0 on engine-0"):
            await dispatcher.drain(0.05)
        assert not dispatcher.held
        engines[0].open.set()
        await running

    play(scene, engines=1)


@pytest.mark.parametrize("seed", range(3))
def test_a6_no_slot_is_leaked_in_a_storm_of_faults_cancellations_and_holds(seed):
    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        chance = random.Random(seed)
        for fake in engines:
            fake.delay_s = 0.002
            fake.faults.extend(chance.choices(["", "", "500", "drop", "400", "abort"], k=200))
        tasks: list[asyncio.Task[Completion]] = []
        for number in range(120):
            tasks.append(asyncio.ensure_future(dispatcher.generate(request(number), urgent=chance.random() < 0.2)))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.1:
                dispatcher.interrupt(chance.choice(engines).engine_id)
            if chance.random() < 0.05:
                await dispatcher.drain(10.0)
                dispatcher.resume()
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, Completion):
                assert result.generation.tokens == expected(number)
            else:
                assert isinstance(result, GenerationFailed | asyncio.CancelledError)
        assert [dispatcher.router.load(fake.engine_id) for fake in engines] == [0, 0, 0]

    play(scene, engines=3, capacity=4)


@pytest.mark.parametrize("whole", [True, False])
def test_a4_an_answer_by_new_weights_waits_until_they_are_proven(whole: bool):
    """Fault: a request ends between the moment in which its engine goes on with new weights and the one in which the
    dispatcher hears of it; the engine may turn out not to have them."""

    async def scene(dispatcher: Dispatcher, engines: list[FakeEngine]) -> None:
        first, second = engines
        first.open.clear()
        asking = asyncio.ensure_future(dispatcher.generate(request()))
        await first.running_requests(1)
        dispatcher.hold()
        first.version = second.version = "1"
        first.open.set()
        await first.running_requests(0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not asking.done()
        assert dispatcher.router.engine("engine-0").state is EngineState.SERVING
        serving = ["engine-0", "engine-1"] if whole else ["engine-1"]
        dispatcher.router.release(1, serving, {} if whole else {"engine-0": "digest differs"})
        dispatcher.resume()
        completion = await asking
        assert completion.engine_id == serving[0]
        assert completion.generation.tokens == expected()
        assert completion.generation.versions[-1] == 1

    play(scene)
