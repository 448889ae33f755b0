"""Siblings that wait for their prompt, in any order of answers, faults, cancellations, losses and weight updates."""

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.client import EngineError, EngineRefused, EngineTimeout, EngineUnreachable
from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import Completion, Dispatcher, GenerateRequest, GenerationFailed
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import LeastLoaded, Router
from slimerl.rollout.shared_prompts import MIN_SAVED_TOKENS
from slimerl.samples.messages import EngineInfo, EngineState

PROMPTS = [tuple(range(3 + number, 3 + number + MIN_SAVED_TOKENS)) for number in range(2)]
REQUEST_S = 100.0
NAMES = ["engine-0", "engine-1"]
LENGTH = 4
"""Of an answer; its tokens are their places."""


class _Instant(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Waits for no clock: what is waited for is there at once."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits for somebody else"
        self.passed_s += timeout
        return super().select(0)


def instantly(scene: Coroutine[Any, Any, None]) -> None:
    """Run it by a clock of its own, on which nothing but waiting takes time."""
    selector = _Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.passed_s  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scene)


@dataclass
class Asked:
    name: str
    params: SamplingParams
    answer: "asyncio.Future[str]"


@dataclass
class ScriptedEngine:
    """Answers as it is told to."""

    engine_id: str
    fleet: "Fleet"
    version: int = 0
    asked: list[Asked] = field(default_factory=list)

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        timeout_s: float | None,
        extra: Mapping[str, Any] | None,
        told: Callable[[Generation], None] | None = None,
    ) -> Generation:
        self.fleet.sent(self)
        one = Asked(request_id or "", params, asyncio.Future())
        self.asked.append(one)
        whole, versions = list(range(len(input_ids), len(input_ids) + params.max_new_tokens)), []

        def make(count: int) -> None:
            new = whole[len(versions) :][:count]
            versions.extend([self.version] * len(new))
            if told is not None and new:
                told(Generation(new, [-0.5] * len(new), [self.version] * len(new), "", {}, {}))

        try:
            async with asyncio.timeout(timeout_s):
                while (answer := await one.answer) == "one token":
                    one.answer = asyncio.Future()
                    make(1)
        except TimeoutError:
            raise EngineTimeout(self.engine_id, "/generate", "no answer") from None
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)  # for the abort
            raise
        finally:
            self.asked.remove(one)
        if answer in FAULTS:
            raise FAULTS[answer](self.engine_id)
        if answer == "well":
            make(LENGTH)
        made = whole[: len(versions)]
        reason = "length" if len(made) == params.max_new_tokens else "abort"
        return Generation(made, [-0.5] * len(made), versions, reason, {}, {})

    async def abort(self, request_id: str | None, *, timeout_s: float | None) -> None:
        for one in self.asked:
            if one.name == request_id and not one.answer.done():
                one.answer.set_result("abort")

    async def healthy(self, *, timeout_s: float | None) -> bool:
        return True

    async def weight_version(self, *, timeout_s: float | None) -> int:
        return self.version

    async def continue_generation(self, *, timeout_s: float | None) -> None:
        pass

    async def close(self) -> None:
        pass


FAULTS = {
    "500": lambda name: EngineRefused(name, "/generate", 500, "injected"),
    "400": lambda name: EngineRefused(name, "/generate", 400, "injected"),
    "drop": lambda name: EngineUnreachable(name, "/generate", "injected"),
    "garbage": lambda name: EngineError(name, "/generate", "injected"),
}


class Fleet:
    """Engines, the dispatcher before them, and what it was asked for."""

    def __init__(self, router: Router) -> None:
        self.engines = {name: ScriptedEngine(name, self) for name in NAMES}
        self.router = router
        self.dispatcher = Dispatcher(router, self.engines, REQUEST_S)
        self.tasks: dict[str, asyncio.Task[Completion]] = {}
        self.told: dict[str, list[int]] = defaultdict(list)
        self.numbers = 0
        for name in NAMES:
            router.join(EngineInfo(name, "http://x", "key", 1))
        router.release(0, NAMES, {})

    def sent(self, engine: ScriptedEngine) -> None:
        assert not self.dispatcher.held, "something was sent while dispatch was held"
        state = self.router.engine(engine.engine_id).state
        assert state is EngineState.SERVING, f"something was sent to an engine that is {state}"

    def ask(self, count: int, prompt: int, urgent: bool, reads_along: bool) -> None:
        for _ in range(count):
            number = self.numbers = self.numbers + 1
            told = self.told[f"r{number}"]
            request = GenerateRequest(
                *(f"r{number}", f"g{prompt}", PROMPTS[prompt], SamplingParams(LENGTH)),
                told=(lambda new, to=told: to.extend(new.tokens)) if reads_along else None,
            )
            self.tasks[request.request_id] = asyncio.ensure_future(self.dispatcher.generate(request, urgent=urgent))

    def asked(self) -> list[Asked]:
        return [one for engine in self.engines.values() for one in engine.asked if not one.answer.done()]

    def update(self, whole: list[str]) -> None:
        """To the next version; the others are not to be trusted."""
        version = self.router.version + 1
        alive = [name for name in NAMES if self.router.engine(name).state is not EngineState.DEAD]
        for name in whole:
            self.engines[name].version = version
        self.router.release(version, whole, {name: "digest differs" for name in alive if name not in whole})
        for name in set(alive) - set(whole):
            self.dispatcher.interrupt(name)
        self.dispatcher.resume()

    def lose(self, name: str) -> None:
        self.router.leave(name, "it has ended")
        self.dispatcher.interrupt(name)
        self.dispatcher.refresh()

    def back(self) -> None:
        """All that are dead join; an update brings all into service."""
        for name in NAMES:
            if self.router.engine(name).state is EngineState.DEAD:
                self.router.join(EngineInfo(name, "http://x", "key", 1))
        self.dispatcher.hold()
        self.update(NAMES)


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 6), st.integers(0, 1), st.booleans(), st.booleans()),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(
        st.just("answer"), st.integers(0, 20), st.sampled_from(["well"] * 3 + ["one token"] * 3 + ["abort", *FAULTS])
    ),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("hold")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("update"), st.sampled_from([NAMES, NAMES[:1], NAMES[1:]])),
    st.tuples(st.just("ahead"), st.sampled_from(NAMES)),
    st.tuples(st.just("lose"), st.sampled_from(NAMES)),
    st.tuples(st.just("back")),
    st.tuples(st.just("time"), st.floats(0, 1.5 * REQUEST_S)),
)


async def act(fleet: Fleet, action: tuple[Any, ...]) -> None:
    match action:
        case "ask", *how:
            fleet.ask(*how)
        case "turns", count:
            for _ in range(count):
                await asyncio.sleep(0)
        case "answer", number, answer:
            asked = fleet.asked()
            for one in asked if number is None else asked[number % max(1, len(asked)) :][:1]:
                one.answer.set_result(answer)
        case "cancel", number:
            if running := [task for task in fleet.tasks.values() if not task.done()]:
                running[number % len(running)].cancel()
        case ["hold"]:
            fleet.dispatcher.hold()
        case ["resume"]:
            fleet.dispatcher.resume()
        case "update", whole:
            fleet.dispatcher.hold()
            fleet.update([name for name in whole if fleet.router.engine(name).state is not EngineState.DEAD])
        case "ahead", name if fleet.dispatcher.held:
            # it goes on with new weights before that is known
            fleet.engines[name].version = fleet.router.version + 1
        case "lose", name:
            fleet.lose(name)
        case ["back"]:
            fleet.back()
        case "time", seconds:
            await asyncio.sleep(seconds)


async def play(router: Router, actions: list[tuple[Any, ...]]) -> None:
    fleet = Fleet(router)
    for action in actions:
        await act(fleet, action)
    fleet.back()
    while not all(task.done() for task in fleet.tasks.values()):
        for one in fleet.asked():
            one.answer.set_result("well")
        await asyncio.sleep(0.01)
    whole = list(range(len(PROMPTS[0]), len(PROMPTS[0]) + LENGTH))
    for name, task in fleet.tasks.items():
        told = fleet.told[name]
        assert told == whole[: len(told)]
        if task.cancelled():
            continue
        if (error := task.exception()) is None:
            generation = task.result().generation
            assert generation.tokens == whole[: len(generation.tokens)]
            assert generation.finish_reason == "abort" or generation.tokens == whole
            assert told in ([], generation.tokens)
        elif not isinstance(error, GenerationFailed):
            raise error
    dispatcher = fleet.dispatcher
    await dispatcher.close()
    assert router.running() == []
    assert dispatcher.in_flight == 0
    assert not dispatcher._prompts._companies
    assert not dispatcher._prompts._joined


@pytest.mark.parametrize("router", [lambda: LeastLoaded(4), lambda: KvRouter(4)], ids=["least loaded", "kv"])
@settings(max_examples=100, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_whatever_happens_everyone_gets_an_answer_and_nothing_is_left(
    router: Any, actions: list[tuple[Any, ...]]
) -> None:
    instantly(play(router(), actions))
