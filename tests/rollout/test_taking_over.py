"""A rollout role in the place of one that was killed: which engines serve at once, and what the trainer's calls do."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_engine import KEY, FakeEngine
from journaled import Act, play
from scene import PATIENCE_S, Scene, rollout

from slimerl.engine.__main__ import version_for_nobody
from slimerl.engine.client import EngineClient
from slimerl.rewards.outcome import Scored
from slimerl.rollout.journal_file import JournalFile
from slimerl.rollout.taking_over import take_over
from slimerl.rollout.weights import HoldError
from slimerl.samples.journal import JournalDamaged
from slimerl.samples.messages import (
    EngineLost,
    EngineState,
    EvaluateReply,
    EvaluateRequest,
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    SyncWanted,
)

RETURNS_S = 5.0


def process(act: Act, directory: Path, takes_over: bool = False, **options: Any) -> Any:
    """What `act` returns in a role whose journal stays as it is when `act` has ended."""

    async def begin(made: Scene, journal: JournalFile) -> None:
        if takes_over:
            for engine in made.engines:
                made.weights.pools.of(engine.engine_id).router.leave(engine.engine_id, "it has not registered here")
        await take_over(made.service, journal, directory, RETURNS_S, takes_over)

    return play(act, directory, begin, **options)


async def hold(made: Scene, version: int) -> HoldReply:
    return await made.weights.hold(HoldRequest(version, PATIENCE_S))


async def sync(made: Scene, version: int, dirty: dict[str, str] | None = None) -> ReleaseRequest:
    reply = await hold(made, version)
    held = {one.engine_id for one in reply.engines}
    for engine in made.engines:
        engine.version = str(version) if engine.engine_id in held else engine.version
    whole = [one.engine_id for one in reply.engines if one.engine_id not in (dirty or {})]
    request = ReleaseRequest(reply.lease_id, version, whole, dirty or {})
    made.weights.release(request)
    return request


def register(made: Scene, number: int, version: int, key: str = KEY) -> EngineState:
    """The same server as before, for all that this role can tell, but for `key`."""
    engine = made.engines[number]
    engine.version = str(version)
    return made.service.register(msgspec.structs.replace(engine.info, version=version, admin_key=key)).state


async def trained_one(made: Scene) -> ReleaseRequest:
    await sync(made, 0)
    made.scheduler.trained((await made.batch(1)).batch_id)
    return await sync(made, 1)


async def with_a_batch_out(made: Scene) -> list[str]:
    await trained_one(made)
    return [one.sample_id for one in (await made.batch(2)).samples]


def test_a5_engines_that_nobody_wrote_to_serve_at_once_and_the_batch_is_handed_out_again(tmp_path):
    """Injected: killed after step 2 was handed out; no sync is needed."""

    async def after(made: Scene) -> Any:
        waiting = asyncio.ensure_future(made.batch(2))
        assert [one.sample_id for one in (await waiting).samples] == handed, "without any engine"
        assert [register(made, number, 1) for number in range(2)] == [EngineState.SERVING] * 2
        made.scheduler.trained("step-2")
        await sync(made, 2)
        manifest = await made.batch(3)
        made.store.check()
        return {one.oldest_version for one in manifest.samples}

    handed = process(with_a_batch_out, tmp_path / "journal")
    assert process(after, tmp_path / "journal", takes_over=True) == {2}


def test_a_batch_that_is_not_ready_waits_for_the_engines_that_come_again(tmp_path):
    """Injected: killed while step 2 was being generated; the trainer asks before an engine has registered."""

    async def before(made: Scene) -> None:
        await sync(made, 0)
        made.scheduler.trained((await made.batch(1)).batch_id)
        for engine in made.engines:
            engine.open.clear()
        await sync(made, 1)

    async def after(made: Scene) -> Any:
        waiting = asyncio.ensure_future(made.batch(2))
        evaluating = asyncio.ensure_future(made.service.evaluate(EvaluateRequest(1, PATIENCE_S)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not evaluating.done()
        for number in range(2):
            register(made, number, 1)
        reply = await evaluating
        assert isinstance(reply, EvaluateReply)
        assert reply.version == 1
        return len((await waiting).samples)

    process(before, tmp_path / "journal")
    assert process(after, tmp_path / "journal", takes_over=True) == 6


def test_w2_after_a_kill_within_a_hold_no_engine_serves_before_a_whole_update(tmp_path):
    """Injected: killed while the trainer wrote to the engines; one of them had committed already."""

    async def before(made: Scene) -> HoldReply:
        await trained_one(made)
        made.scheduler.trained((await made.batch(2)).batch_id)
        return await hold(made, 2)

    async def after(made: Scene) -> Any:
        assert [register(made, 0, 2), register(made, 1, 1)] == [EngineState.JOINING] * 2
        with pytest.raises(HoldError, match=f"lease {lease.lease_id} is not held"):
            made.weights.release(ReleaseRequest(lease.lease_id, 2, ["engine-0", "engine-1"]))
        assert made.scheduler.gate.version == 1, "nothing of version 2 begins"
        assert await made.batch(3) == SyncWanted(["engine-0", "engine-1"])
        assert not any(engine.requests for engine in made.engines)
        await sync(made, 2)
        manifest = await made.batch(3)
        return {(one.oldest_version, one.newest_version) for one in manifest.samples}

    lease = process(before, tmp_path / "journal")
    assert process(after, tmp_path / "journal", takes_over=True) == {(2, 2)}


def test_a_release_whose_answer_was_lost_is_the_same_when_it_is_asked_for_again(tmp_path):
    """Injected: killed between the release and its answer; then a release of another lease."""

    async def after(made: Scene) -> None:
        made.weights.release(released)
        with pytest.raises(HoldError, match="lease other is not held"):
            made.weights.release(msgspec.structs.replace(released, lease_id="other"))
        assert [register(made, number, 1) for number in range(2)] == [EngineState.SERVING] * 2

    released = process(trained_one, tmp_path / "journal")
    process(after, tmp_path / "journal", takes_over=True)


@pytest.mark.parametrize(
    ("what", "registration"),
    [
        ("another version", {"version": 0}),
        ("no version", {"version": -1}),
        ("a server that was started meanwhile", {"version": 1, "key": "new"}),
    ],
)
def test_w2_an_engine_that_may_be_another_serves_after_a_sync_alone(tmp_path, what, registration):
    async def after(made: Scene) -> None:
        assert register(made, 0, **registration) is EngineState.JOINING, what
        assert register(made, 1, 1) is EngineState.SERVING
        assert "engine-0" not in made.router.serving()
        await sync(made, 1)
        assert sorted(made.router.serving()) == ["engine-0", "engine-1"]

    process(trained_one, tmp_path / "journal")
    process(after, tmp_path / "journal", takes_over=True)


@pytest.mark.parametrize(("evaluated", "state"), [(1, EngineState.SERVING), (0, EngineState.JOINING)])
def test_w2_an_engine_that_evaluates_alone_serves_at_once_where_it_has_the_version_released_last(
    tmp_path, evaluated, state
):
    """The other one holds weights that nobody evaluates any more."""
    options = {"evaluators": 1, "is_due": lambda version: version == evaluated}

    async def after(made: Scene) -> None:
        assert register(made, 0, 1) is EngineState.SERVING
        assert register(made, 1, evaluated) is state
        reply = await made.service.evaluate(EvaluateRequest(1, PATIENCE_S))
        if state is EngineState.SERVING:
            assert isinstance(reply, EvaluateReply)
            assert (reply.version, reply.prompts) == (1, 6)
        else:
            assert reply == SyncWanted(["engine-1"])

    process(trained_one, tmp_path / "journal", **options)
    process(after, tmp_path / "journal", takes_over=True, **options)


@pytest.mark.parametrize("doubt", ["dirty", "wrong version", "given up"])
def test_w2_an_engine_that_was_quarantined_is_not_trusted_by_the_next_process(tmp_path, doubt):
    async def before(made: Scene) -> None:
        await sync(made, 0)
        if doubt == "dirty":
            await sync(made, 1, dirty={"engine-0": "torn"})
            return
        await sync(made, 1)
        if doubt == "given up":
            made.service.lost(EngineLost("engine-0", "removed by command", 0.0))
            return
        made.engines[0].version = "7"
        await made.until(lambda: made.router.engine("engine-0").state is EngineState.DIRTY)

    async def after(made: Scene) -> None:
        assert register(made, 0, 1) is EngineState.JOINING
        assert register(made, 1, 1) is EngineState.SERVING

    process(before, tmp_path / "journal")
    process(after, tmp_path / "journal", takes_over=True)


def test_a_hold_takes_all_engines_along_that_outlived_the_process_before(tmp_path):
    """The trainer's next sync may come before the second engine has registered."""

    async def after(made: Scene) -> list[str]:
        register(made, 0, 1)
        holding = asyncio.ensure_future(hold(made, 2))
        await asyncio.sleep(0.05)
        assert not holding.done()
        register(made, 1, 1)
        return [one.engine_id for one in (await holding).engines]

    process(trained_one, tmp_path / "journal")
    assert process(after, tmp_path / "journal", takes_over=True) == ["engine-0", "engine-1"]


def test_r4_a_group_to_be_replaced_is_replaced_by_the_next_process_where_the_first_did_not_come_to_it(tmp_path):
    """Injected: killed between the last reward of two groups whose answers are all right and their replacement (their
    journal is of a process that replaces none)."""

    async def before(made: Scene) -> list[str]:
        await sync(made, 0)
        await made.until(lambda: len(made.store.ready) == 2)
        return sorted(made.store.ready)

    async def after(made: Scene) -> None:
        made.reward.verdict = lambda request: Scored(1.0, request.sample_id.endswith("/0"))
        for number in range(2):
            register(made, number, 0)
        manifest = await made.batch(1)
        assert not {one.group_id for one in manifest.samples} & set(all_right)
        assert made.store.counts().dropped == {"group_all_right": 6}

    all_right = process(before, tmp_path / "journal")
    process(after, tmp_path / "journal", takes_over=True, dynamic_sampling_rounds=4)


def test_where_there_is_nothing_to_take_over_nobody_is_served(tmp_path):
    """Injected: the journal was given up, for its disk was full."""

    async def never(_: Scene) -> None:
        raise AssertionError("it would hand out the first samples once more")

    with pytest.raises(JournalDamaged, match="holds nothing to take over from; the run has to start over"):
        process(never, tmp_path / "journal", takes_over=True)


def test_requests_are_named_after_their_process_for_engines_that_still_have_some_of_another():
    async def names() -> list[str]:
        async with rollout() as made:
            made.scheduler.dispatcher.process = "second."
            await made.serve(0)
            await made.batch(1)
            return [request["rid"] for engine in made.engines for request in engine.requests]

    assert all("#second." in name for name in asyncio.run(names()))


def test_an_engine_ends_what_it_generates_for_nobody_before_it_says_its_version():
    """Injected: a server that does not say it, or says none of a policy's."""

    async def said(version: str, refusing: str = "") -> tuple[int, list[str]]:
        async with FakeEngine() as engine:
            engine.version = version
            engine.refusing = {refusing}
            client = EngineClient("engine-0", engine.url, KEY, 5.0)
            server = SimpleNamespace(engine_id="engine-0", client=lambda timeout_s: client)
            return await version_for_nobody(server), [path for path in engine.calls if path != "/health"]

    assert asyncio.run(said("3")) == (3, ["/abort_request", "/model_info"])
    assert asyncio.run(said("default"))[0] == -1
    assert asyncio.run(said("3", "/abort_request"))[0] == -1
    assert asyncio.run(said("3", "/model_info"))[0] == -1
