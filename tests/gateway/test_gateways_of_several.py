"""Gateways of several rollout processes: a program talks to any of them, and each session lives in one."""

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import KEY, Front, gateway_scene, ids

from slimerl.rollout.announcing import announce, gateway_key
from slimerl.rollout.gateway.elsewhere import Elsewhere
from slimerl.rollout.shares import is_given, name_of_session, shard_of_session
from slimerl.samples.messages import ServiceAddress, gateway_file
from slimerl.spec.load import spec_from_tree

PROCESSES = 2
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def gateway_of(process: int, run_dir: Path, **options: Any) -> Any:
    """Of one process, with tasks of its own."""
    async with gateway_scene(engines=1, **options) as front:
        front.external.new_name = lambda: name_of_session(process, secrets.randbits(64))
        front.external.is_given = is_given
        front.gateway.elsewhere = Elsewhere(process, PROCESSES, run_dir, KEY, 10.0)
        announce(run_dir / gateway_file(process), ServiceAddress(front.url, KEY, os.getpid()))
        try:
            yield front
        finally:
            await front.gateway.elsewhere.close()


def play_two(act: Callable[[Front, Front], Coroutine[Any, Any, None]], run_dir: Path, *, second: Any = None) -> None:
    """The first has no tasks; `second`: options of the second."""

    async def run() -> None:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            first = await stack.enter_async_context(gateway_of(0, run_dir, groups=1, size=1, steps=0))
            other = {"groups": 1, "size": 2, "steps": 1, **(second or {})}
            await act(first, await stack.enter_async_context(gateway_of(1, run_dir, **other)))

    asyncio.run(run())


async def talk(front: Front, session: str) -> list[str]:
    """A conversation in all the ways there are."""
    client = front.client(session)
    reply = await client.chat.completions.create(model="any", messages=HELLO)
    messages = [*HELLO, reply.choices[0].message, {"role": "user", "content": "go on"}]
    parts = await client.chat.completions.create(model="any", messages=messages, stream=True)
    streamed = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
    body = {"input_ids": ids("How many?"), "sampling_params": {"sampling_seed": 5}}
    status, generated = await front.post("/generate", body, session)
    assert status == 200, generated
    return [reply.choices[0].message.content, streamed, generated["text"]]


def test_a_program_at_one_gateway_gets_the_tasks_of_another_and_its_session_lives_there(tmp_path):
    async def act(first: Front, second: Front) -> None:
        tasks = [await first.take() for _ in range(2)]
        assert {shard_of_session(task["session_id"], PROCESSES) for task in tasks} == {1}
        for number, task in enumerate(tasks):
            session = task["session_id"]
            for front in (first, second):
                assert all(told.startswith("reply ") for told in await talk(front, session))
            assert first.sessions.get(session) is None
            assert len(second.sessions.get(session).turns) == 6
            status, told = await first.post(f"/v1/sessions/{session}/finish", {"reward": float(number)})
            assert (status, told["session_id"]) == (200, session)
        manifest = await second.scene.batch(1)
        assert sorted(meta.reward for meta in manifest.samples) == [0.0, 1.0]
        figures = first.gateway.take_figures()
        assert figures["gateway/forwarded"] == 2 * (3 + 1)
        assert figures["gateway/tasks_from_elsewhere"] == 2
        status, told = await first.post("/v1/chat/completions", {"messages": HELLO}, tasks[0]["session_id"])
        assert (status, told["error"]["code"]) == (410, "session_ended")

    play_two(act, tmp_path)


def test_a_session_that_a_program_names_has_one_home_by_its_name(tmp_path):
    async def act(first: Front, second: Front) -> None:
        fronts = {0: first, 1: second}
        for name in ("a", "b", "c", "d"):
            home = fronts[shard_of_session(name, PROCESSES)]
            for front in (first, second):
                await talk(front, name)
                assert len(front.sessions) == (0 if front is not home else len(home.sessions))
            assert len(home.sessions.get(name).turns) == 6
            home.sessions.close(name)
        status, told = await first.post("/v1/sessions", {"session_id": "mine"})
        assert (status, told["error"]["param"]) == (400, "session_id")
        assert "leave session_id out" in told["error"]["message"]

    play_two(act, tmp_path, second={"steps": 0})


def test_a_process_that_is_gone_is_told_and_what_follows_it_does_not_take_its_sessions_for_new_ones(tmp_path):
    """Fault: the process that has a session ends, in the middle of a stream; another is started in its place."""

    async def act() -> None:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            first = await stack.enter_async_context(gateway_of(0, tmp_path, groups=1, size=1, steps=1))
            own = await first.take()
            async with gateway_of(1, tmp_path, groups=1, size=1, steps=1) as second:
                task = await first.take()
                (engine,) = second.scene.engines
                engine.streams_stop_at = 3
                client = first.client(task["session_id"])
                parts = aiter(await client.chat.completions.create(model="any", messages=HELLO, stream=True))
                await anext(parts)
            broken = [part async for part in _until_broken(parts)]
            assert broken[-1] == "process_away"
            (tmp_path / gateway_file(1)).unlink()
            status, told = await first.post("/v1/chat/completions", {"messages": HELLO}, task["session_id"])
            assert (status, told["error"]["code"]) == (503, "process_away")
            assert "is at rollout process 1, which does not answer" in told["error"]["message"]
            status, told = await first.post("/v1/sessions", {"wait_s": 0.0})
            assert status == 204, "what is gone has no tasks"
            await talk(first, own["session_id"])
            async with gateway_of(1, tmp_path, groups=1, size=1, steps=1) as second:
                status, told = await first.post("/v1/chat/completions", {"messages": HELLO}, task["session_id"])
                assert (status, told["error"]["code"]) == (410, "session_ended")
                again = await first.take()
                await talk(first, again["session_id"])
                status, _ = await first.post(f"/v1/sessions/{again['session_id']}/finish", {"reward": 1.0})
                assert status == 200
                assert [meta.reward for meta in (await second.scene.batch(1)).samples] == [1.0]

    asyncio.run(act())


async def _until_broken(parts: Any) -> Any:
    try:
        async for part in parts:
            yield part
    except Exception as error:  # noqa: BLE001 - whatever the client library makes of it
        yield getattr(error, "code", None) or str(error)


def test_a_task_of_another_process_whose_program_has_gone_meanwhile_is_given_to_the_next(tmp_path):
    """Fault: a program goes while its gateway asks the other one for a task."""

    async def act(first: Front, second: Front) -> None:
        elsewhere, asked, go_on = first.gateway.elsewhere, asyncio.Event(), asyncio.Event()
        task_of = elsewhere._task_of

        async def slowly(process: int) -> Any:
            told = await task_of(process)
            asked.set()
            await go_on.wait()
            return told

        elsewhere._task_of = slowly
        waiting = asyncio.ensure_future(first.take())
        await asked.wait()
        (session,) = [name for name, task in second.external.tasks.items() if task.taken]
        waiting.cancel()
        await first.scene.until(lambda: bool(elsewhere._returning))
        go_on.set()
        await first.scene.until(lambda: not second.external.tasks[session].taken)
        elsewhere._task_of = task_of
        assert {(await first.take())["session_id"] for _ in range(2)} == set(second.external.tasks)

    play_two(act, tmp_path)


def test_all_gateways_of_a_start_have_one_key_that_is_its_users_alone(tmp_path):
    def spec(processes: int) -> Any:
        tree = {
            "name": "key",
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path)},
            "data": {"train_path": "unused.jsonl"},
            "training": {"steps": 1, "prompts_per_step": 2},
            "rollout": {"samples_per_prompt": 2, "processes": processes},
            "engine": {"replicas": 2},
            "agent": {"kind": "external"},
        }
        return spec_from_tree(tree, "test")

    keys = [gateway_key(spec(2)) for _ in range(3)]
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    (file,) = (tmp_path / "run" / "journal").iterdir()
    assert oct(file.stat().st_mode)[-3:] == "600"
    assert gateway_key(spec(1)) != keys[0]


@pytest.mark.parametrize("name", ["1-0123456789abcdef", "7-0123456789abcdef", "x", "1-0123456789abcdeF"])
def test_every_process_says_the_same_of_where_a_session_is(name):
    home = shard_of_session(name, PROCESSES)
    assert home == 1 if name == "1-0123456789abcdef" else 0 <= home < PROCESSES
    for process in range(PROCESSES):
        elsewhere = Elsewhere(process, PROCESSES, Path("unused"), KEY, 1.0)
        assert elsewhere.home(name) == (None if home == process else home)
        assert elsewhere.home("") is None
