"""What goes wrong around the gateway: clients that go, engines that die, weights that change, ten thousand sessions."""

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from gateway_scene import END, Front, fake_engine_of, ids, model_text, play

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.full_collections import defer_full_collections
from slimerl.rollout.gateway.desk import Desk
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.requests import ChatBody
from slimerl.rollout.gateway.sampler import TurnSampler
from slimerl.rollout.gateway.sessions import Sessions
from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_memory import Memory
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.parts import Parts
from slimerl.samples.messages import EngineInfo, HoldRequest, ReleaseRequest

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def in_parts(prompt: Sequence[int], seed: int) -> list[int]:
    """The rest of a long reply, wherever it was cut."""
    whole = ids("one two three four five six seven eight nine ten")
    mark = ids("assistant\n")
    start = next(at for at in range(len(prompt), 0, -1) if list(prompt[at - len(mark) : at]) == mark)
    return [*whole[len(prompt) - start :], END]


@pytest.mark.parametrize("stream", [True, False])
def test_a6_a_client_that_goes_in_the_middle_leaves_nothing_behind(stream):
    """Fault: the connection is closed while an engine computes; in a stream, after the first part."""

    async def act(front: Front) -> None:
        engine = fake_engine_of(front)
        # the third part waits in the engine; without a stream the client does not see the others
        engine.stopped_at = len(ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")) + 10
        client = front.client("s")
        asking = asyncio.ensure_future(client.chat.completions.create(model="any", messages=HELLO, stream=stream))
        if stream:
            parts = await asking
            assert (await anext(aiter(parts))).choices[0].delta.role == "assistant"
        await front.scene.until(lambda: bool(engine.waiting))
        rid = engine.waiting[0]["rid"]
        if stream:
            await parts.close()
        else:
            asking.cancel()
        await front.scene.until(front.idle)
        await front.scene.until(lambda: rid in engine.aborted)
        session = front.sessions.get("s")
        assert (session.turns, session.under_way) == ([], 0)
        assert front.gateway.take_figures()["gateway/disconnected"] == 1
        engine.stopped_at = None
        again = await client.chat.completions.create(model="any", messages=HELLO)
        assert again.choices[0].message.content == "one two three four five six seven eight nine ten"
        (turn,) = session.turns
        assert turn.parent is None

    play(act, engines=1, answer=in_parts, chunk_tokens=5)


@pytest.mark.parametrize("fault", ["drop", "500", "hang"])
def test_a_client_does_not_notice_an_engine_that_fails(fault):
    """Faults: an engine drops the connection, answers an error, or does not answer, in the middle of a reply."""

    async def act(front: Front) -> None:
        for engine in front.scene.engines:
            engine.faults.extend(["", fault])
        reply = await front.client("s").chat.completions.create(model="any", messages=HELLO)
        assert reply.choices[0].message.content == "one two three four five six seven eight nine ten"
        (turn,) = front.sessions.get("s").turns
        assert list(turn.tokens) == in_parts(turn.context(), 0)
        await front.scene.until(front.idle)

    play(act, engines=2, answer=in_parts, chunk_tokens=20, request_s=10.0, engine_s=0.5)


def test_a_client_is_told_when_the_last_engine_dies():
    """Fault: the only engine ends in the middle of a stream."""

    async def act(front: Front) -> None:
        engine = fake_engine_of(front)
        engine.stopped_at = len(ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")) + 5
        client = front.client("s")
        parts = aiter(await client.chat.completions.create(model="any", messages=HELLO, stream=True))
        assert (await anext(parts)).choices[0].delta.role == "assistant"
        await front.scene.until(lambda: bool(engine.waiting))
        await engine.stop()
        with pytest.raises(openai.APIError, match="no engine generated this"):
            async for _ in parts:
                pass
        await front.scene.until(front.idle)
        assert front.sessions.get("s").turns == []
        figures = front.gateway.take_figures()
        assert sum(value for name, value in figures.items() if name.startswith("gateway/errors_generation")) == 1

    play(act, engines=1, answer=in_parts, chunk_tokens=5)


def test_a4_new_weights_in_the_middle_of_a_reply_are_invisible_to_the_client():
    """Fault: a weight update in `abort` mode while the engine has generated a part."""

    async def act(front: Front) -> None:
        scene, engine = front.scene, fake_engine_of(front)
        engine.open.clear()
        talking = asyncio.ensure_future(front.client("s").chat.completions.create(model="any", messages=HELLO))
        await engine.running_requests(1)
        lease = await scene.weights.hold(HoldRequest(1, 10.0))
        await scene.service.clients[engine.engine_id].pause("abort")
        await scene.until(lambda: not engine.running)
        engine.version = "1"
        engine.open.set()
        await scene.service.clients[engine.engine_id].continue_generation()
        assert not talking.done(), "it waits for the new weights"
        scene.weights.release(ReleaseRequest(lease.lease_id, 1, [engine.engine_id]))
        reply = await talking
        assert reply.choices[0].message.content == "one two three four five six seven eight nine ten"
        (turn,) = front.sessions.get("s").turns
        assert list(turn.tokens) == in_parts(turn.context(), 0)
        assert sorted(set(turn.versions)) == [0, 1]
        assert list(turn.versions) == sorted(turn.versions)

    play(act, engines=1, answer=in_parts, on_update="abort")


def test_a3_a_request_that_no_engine_takes_ends_at_its_deadline():
    async def act(front: Front) -> None:
        front.scene.scheduler.dispatcher.hold()
        with pytest.raises(openai.InternalServerError, match=r"no engine had answered after 0\.2 s") as late:
            await front.client("s").chat.completions.create(model="any", messages=HELLO)
        assert late.value.status_code == 504
        front.scene.scheduler.dispatcher.resume()
        await front.scene.until(front.idle)

    play(act, engines=1, request_s=0.2)


class MockEngines(dict[str, "MockEngines"]):
    """All of them: each request is answered after a while, some never well."""

    def __init__(self, count: int) -> None:
        super().__init__({f"e{number}": self for number in range(count)})
        self.random = random.Random(0)
        self.most_running = self.running = 0
        self.version = 0
        self.seconds = (5.0, 8.0)

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float, extra: object
    ) -> Generation:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.random.uniform(*self.seconds))
        finally:
            self.running -= 1
        tokens = [5 + (len(input_ids) + at) % 90 for at in range(7)] + [END]
        return Generation(tokens, [-0.5] * 8, [self.version] * 8, "stop", {"cached_tokens": 0}, {})

    async def healthy(self, *, timeout_s: float | None) -> bool:
        return True


def mock_desk(engines: MockEngines) -> tuple[Dispatcher, Desk]:
    router = KvRouter(256, 8, EngineModel(slots=256))
    for name in engines:
        router.join(EngineInfo(name, "", "", 1))
    router.release(0, list(engines), {})
    dispatcher = Dispatcher(router, engines, 60.0)
    external = ExternalAgents(Sessions(), 60.0)
    parts = Parts(SamplingParams(1000, stop_token_ids=(END,)), 7)
    return dispatcher, Desk(
        external, TurnSampler(dispatcher, external.sessions, parts, 1000, 60.0), model_text(), 1.0, "m"
    )


def nobody() -> None:
    pass


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """Its clock is the CPU time of this process, and it skips what it would sleep: what else runs on the machine has no
    part in what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped = 0.0
        plain = self._selector.select

        def select(timeout: float | None = None) -> list:
            found = plain(0 if timeout is None or timeout > 0 else timeout)
            if not found and timeout is not None and timeout > 0:
                self._skipped += timeout
            return found

        self._selector.select = select

    def time(self) -> float:
        return time.process_time() + self._skipped


class Lag:
    """How late the event loop was at worst."""

    worst_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.005
            await asyncio.sleep(0.005)
            self.worst_s = max(self.worst_s, loop.time() - due)


def test_a8_ten_thousand_sessions_at_once_leave_nothing_and_the_loop_is_never_late():
    """Ten thousand conversations under way at a time; one client in ten goes, one goes on; while a quarter of them
    come, dispatch is held, as for new weights."""
    many = 10_000

    async def run() -> tuple[Desk, MockEngines, float, dict[str, int]]:
        engines = MockEngines(40)
        dispatcher, desk = mock_desk(engines)
        outcomes = {"finished": 0, "gone": 0}

        async def converse(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
            for _ in range(2 if number % 10 == 0 else 1):
                order = await desk.chat(f"s{number}", ChatBody(messages=messages))
                filling = asyncio.ensure_future(desk.fill(order, nobody))
                if number % 10 == 1:
                    await asyncio.wait([filling], timeout=2.0)
                    filling.cancel()
                    await asyncio.wait([filling])
                    outcomes["gone"] += 1
                    return
                await filling
                engines.seconds = (0.1, 0.5)
                messages = [*messages, order.answer.message(), {"role": "user", "content": "on"}]
            outcomes["finished"] += 1

        lag = Lag()
        watching = asyncio.ensure_future(lag.watch())
        talking = []
        for number in range(many):
            talking.append(asyncio.ensure_future(converse(number)))
            if number % 20 == 0:
                await asyncio.sleep(0.005)  # clients come one after the other
            if number == many * 3 // 4:
                dispatcher.hold()
        dispatcher.resume()
        await asyncio.gather(*talking)
        watching.cancel()
        return desk, engines, lag.worst_s, outcomes

    gc.collect()
    before = gc.get_threshold()
    defer_full_collections()
    try:
        with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
            desk, engines, worst_s, outcomes = runner.run(run())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    print(
        f"most requests in engines at once: {engines.most_running}; worst lag of the event loop: {worst_s * 1e3:.0f} ms"
    )
    assert outcomes == {"finished": many * 9 // 10, "gone": many // 10}
    sessions, dispatcher = desk.external.sessions, desk.sampler.dispatcher
    assert engines.running == dispatcher.in_flight == len(dispatcher.router.running()) == 0
    assert len(sessions) == many
    assert sum(len(session.turns) for session in sessions) == outcomes["finished"] + many // 10
    assert not any(session.under_way for session in sessions)
    assert sessions.tokens == sum(session.tokens for session in sessions)
    assert engines.most_running > many * 3 // 4
    assert worst_s < 0.05


def test_memory_is_flat_over_sessions_that_end():
    """Objects that live, after rounds of conversations of which one in ten is broken off."""

    async def run() -> list[int]:
        engines = MockEngines(4)
        engines.seconds = (0.0, 0.01)
        _, desk = mock_desk(engines)
        alive = []

        async def converse(name: str, goes: bool) -> None:
            order = await desk.chat(name, ChatBody(messages=HELLO))
            filling = asyncio.ensure_future(desk.fill(order, nobody))
            if goes:
                await asyncio.sleep(0)
                filling.cancel()
            await asyncio.wait([filling])

        for number in range(6):
            names = [f"{number}/{each}" for each in range(200)]
            await asyncio.gather(*(converse(name, at % 10 == 0) for at, name in enumerate(names)))
            for name in names:
                desk.external.sessions.close(name)
            assert (len(desk.external.sessions), desk.external.sessions.tokens) == (0, 0)
            # what the router remembers of sessions has a bound of its own
            desk.sampler.dispatcher.router._memory = Memory()
            gc.collect()
            alive.append(len(gc.get_objects()))
        return alive

    alive = asyncio.run(run())
    assert alive[-1] - alive[2] < 100, alive
