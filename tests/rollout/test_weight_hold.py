"""Holds: the trainer gets idle engines, and its end never leaves them held or half written in service."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from fake_engine import LONG, go_on
from scene import Scene, rollout

from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.rollout.weights import HoldError
from slimerl.samples.messages import EngineLost, EngineState, HoldReply, HoldRequest, ReleaseRequest, unpack_array

Play = Callable[[Scene], Coroutine[Any, Any, None]]


def play(scene: Play, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), rollout(**options) as made:
            await scene(made)

    asyncio.run(run())


async def hold(made: Scene, version: int, lease_s: float = 20.0) -> HoldReply:
    return await made.weights.hold(HoldRequest(version, lease_s))


def commit(made: Scene, version: int, *engines: int) -> list[str]:
    """What the trainer's sync does to engines: they hold `version`."""
    for number in engines:
        made.engines[number].version = str(version)
    return [made.engines[number].engine_id for number in engines]


async def sync(made: Scene, version: int) -> None:
    reply = await hold(made, version)
    whole = commit(made, version, *range(len(made.engines)))
    made.weights.release(ReleaseRequest(reply.lease_id, version, whole))


def states(made: Scene) -> list[tuple[EngineState, int]]:
    return [(engine.state, engine.version) for engine in made.router.engines()]


def test_the_first_hold_gives_the_joining_engines_and_its_release_puts_them_into_service():
    async def scene(made: Scene) -> None:
        reply = await hold(made, 0)
        assert [engine.engine_id for engine in reply.engines] == ["engine-0", "engine-1"]
        assert {engine.state for engine in reply.engines} == {EngineState.JOINING}
        assert reply.engines[0].url == made.engines[0].url
        made.weights.release(ReleaseRequest(reply.lease_id, 0, commit(made, 0, 0, 1)))
        assert states(made) == [(EngineState.SERVING, 0)] * 2
        assert len((await made.batch(0)).samples) == 6

    play(scene)


def test_a4_a_hold_waits_for_running_requests_and_keeps_new_ones_back():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(1)
        holding = asyncio.ensure_future(hold(made, 1))
        await asyncio.sleep(0.02)
        assert not holding.done()
        sent = len(made.engines[0].requests)
        made.engines[0].open.set()
        reply = await holding
        await asyncio.sleep(0.02)
        assert len(made.engines[0].requests) == sent, "nothing may be sent to a held engine"
        made.weights.release(ReleaseRequest(reply.lease_id, 1, commit(made, 1, 0)))
        manifests = [await made.batch(step) for step in range(2)]
        versions = {sample.newest_version for manifest in manifests for sample in manifest.samples}
        assert versions == {0, 1}
        assert all(one.oldest_version == one.newest_version for manifest in manifests for one in manifest.samples)

    play(scene, engines=1, capacity=1, staleness=1, on_update="drain")


def test_a3_a_hold_that_cannot_drain_names_the_request_and_lets_the_run_go_on():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(6)
        with pytest.raises(DeadlineExceeded, match=r"6 requests to end before a weight update: .*/0 on engine-0"):
            await hold(made, 1, lease_s=0.05)
        made.engines[0].open.set()
        await made.batch(0)
        await sync(made, 1)

    play(scene, engines=1, on_update="drain")


def test_a4_running_requests_go_on_under_the_new_weights_each_token_with_its_version():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(6)
        async with asyncio.timeout(1):
            await sync(made, 1)
        made.engines[0].open.set()
        manifest = await made.batch(1)
        assert manifest.metrics["rollout/mixed_version_fraction"] > 0.5
        for payload in made.store.payloads([one.sample_id for one in manifest.samples]):
            versions = unpack_array(payload.versions, "int32").tolist()
            assert versions == sorted(versions)
            assert set(versions) <= {0, 1}
        asked = [one["rid"] for one in made.engines[0].requests]
        assert len(asked) == len(set(asked)), "nothing was sent twice"

    play(scene, engines=1)


def test_a4_requests_cut_off_by_new_weights_are_sent_again_with_their_tokens():
    """Injected: a pause that aborts, twice."""

    async def scene(made: Scene) -> None:
        made.engines[0].answer = go_on
        await sync(made, 0)
        made.engines[0].open.clear()
        for version in (1, 2):
            await made.engines[0].running_requests(6)
            reply = await hold(made, version)
            client = made.service.clients["engine-0"]
            await client.pause("abort")
            await made.engines[0].running_requests(0)
            await client.continue_generation()
            made.weights.release(ReleaseRequest(reply.lease_id, version, commit(made, version, 0)))
        made.engines[0].open.set()
        manifest = await made.batch(1)
        assert manifest.metrics["rollout/interruptions"] == 12
        assert manifest.metrics["rollout/retries"] == 0
        assert made.store.counts().dropped == {}
        seeds = {one["rid"].partition("#")[0]: one["sampling_params"]["sampling_seed"]
                 for one in made.engines[0].requests}  # fmt: skip
        for payload in made.store.payloads([one.sample_id for one in manifest.samples]):
            tokens = unpack_array(payload.tokens, "int32").tolist()
            assert tokens[2:] == go_on(tokens[:2], seeds[payload.sample_id]), "as if nothing had come between"
            assert unpack_array(payload.versions, "int32").tolist() == [0] * 6 + [1] * 3 + [2] * 3

    play(scene, engines=1, max_new_tokens=LONG)


def test_a4_requests_that_wait_in_an_engine_with_spoilt_weights_move_to_another():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        made.engines[0].open.clear()
        await made.engines[0].running_requests(2)
        reply = await hold(made, 1)
        commit(made, 1, 1)
        made.weights.release(ReleaseRequest(reply.lease_id, 1, ["engine-1"], {"engine-0": "torn"}))
        manifest = await made.batch(1)
        assert len(made.engines[0].aborted) == 2, "the engine computes for nobody"
        assert manifest.metrics["rollout/retries"] == 2
        assert {sample.newest_version for sample in manifest.samples} <= {0, 1}

    play(scene, engines=2, staleness=0)


def test_two_holds_at_once_are_refused():
    async def scene(made: Scene) -> None:
        reply = await hold(made, 0)
        with pytest.raises(HoldError, match=f"held already: lease {reply.lease_id} for version 0"):
            await hold(made, 0)

    play(scene)


def test_releases_that_do_not_fit_the_lease_are_refused():
    async def scene(made: Scene) -> None:
        with pytest.raises(HoldError, match="lease x is not held"):
            made.weights.release(ReleaseRequest("x", 0, []))
        reply = await hold(made, 2)
        with pytest.raises(HoldError, match="is for version 2, not 3"):
            made.weights.release(ReleaseRequest(reply.lease_id, 3, ["engine-0"]))
        made.weights.release(ReleaseRequest(reply.lease_id, 2, commit(made, 2, 0, 1)))
        with pytest.raises(HoldError, match="version 1 is older than version 2"):
            await hold(made, 1)

    play(scene)


def test_w2_engines_that_a_release_calls_dirty_or_does_not_name_are_quarantined():
    async def scene(made: Scene) -> None:
        reply = await hold(made, 0)
        made.weights.release(ReleaseRequest(reply.lease_id, 0, commit(made, 0, 0), {"engine-1": "torn"}))
        assert [state for state, _ in states(made)] == [EngineState.SERVING, EngineState.DIRTY, EngineState.DIRTY]
        assert made.router.reasons() == {"engine-1": "torn", "engine-2": "the release said nothing of it"}
        await made.batch(0)
        assert [bool(engine.requests) for engine in made.engines] == [True, False, False]
        await sync(made, 1)
        assert [state for state, _ in states(made)] == [EngineState.SERVING] * 3

    play(scene, engines=3)


def test_a5_a_lease_that_runs_out_releases_what_was_committed_and_quarantines_the_rest():
    """Fault: the trainer ends between the commit of one engine and that of the other."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await made.batch(0)
        reply = await hold(made, 1, lease_s=0.1)
        commit(made, 1, 0)
        made.engines[0].paused = True
        await made.until(lambda: made.router.version == 1)
        assert states(made) == [(EngineState.SERVING, 1), (EngineState.DIRTY, 0)]
        assert not made.engines[0].paused
        assert "the lease ran out" in made.router.reasons()["engine-1"]
        with pytest.raises(HoldError, match="may have run out"):
            made.weights.release(ReleaseRequest(reply.lease_id, 1, ["engine-0", "engine-1"]))
        manifest = await made.batch(1)
        assert {sample.oldest_version for sample in manifest.samples} == {1}
        await sync(made, 2)
        assert states(made) == [(EngineState.SERVING, 2)] * 2

    play(scene)


def test_w2_an_engine_that_said_the_version_before_the_lease_proves_nothing_by_saying_it_after():
    """Fault: the trainer ends while it rewrites engines with the version that they hold already."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await hold(made, 0, lease_s=0.05)
        await made.until(lambda: not made.weights.busy)
        assert states(made) == [(EngineState.DIRTY, 0)] * 2

    play(scene)


def start_anew(made: Scene, number: int) -> None:
    """Another server registers as the engine of that number; it has whatever weights it started with."""
    made.service.lost(EngineLost(made.engines[number].engine_id, "was killed by SIGKILL", 60.0))
    made.service.register(msgspec.structs.replace(made.engines[number].info, admin_key="of the next start"))


@pytest.mark.parametrize("named", ["whole", "dirty", "nothing"])
def test_w2_an_engine_that_was_started_anew_while_weights_were_held_serves_after_a_sync_of_its_own(named):
    """Fault: an engine dies in a sync, in or behind its commit, and another registers in its place before the
    release; the trainer knows the first one alone, and says of it whatever became of that."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        reply = await hold(made, 1)
        whole = commit(made, 1, 0, 1)
        start_anew(made, 0)
        dirty = {"engine-0": "it broke the connection"} if named == "dirty" else {}
        made.weights.release(ReleaseRequest(reply.lease_id, 1, whole if named == "whole" else whole[1:], dirty))
        assert states(made) == [(EngineState.JOINING, -1), (EngineState.SERVING, 1)]
        assert made.service._unsynced() == ["engine-0"], "the trainer is told that it wants weights"
        await sync(made, 1)
        assert states(made) == [(EngineState.SERVING, 1)] * 2

    play(scene)


def test_w2_an_engine_that_was_started_anew_before_its_lease_ran_out_is_neither_released_nor_quarantined():
    """Fault: the trainer ends in a sync, and one of its engines, in whose place another registers."""

    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await hold(made, 1, lease_s=0.1)
        commit(made, 1, 0, 1)
        start_anew(made, 0)
        await made.until(lambda: made.router.version == 1)
        assert states(made) == [(EngineState.JOINING, -1), (EngineState.SERVING, 1)]

    play(scene)


def test_the_first_hold_waits_for_every_engine_to_register():
    async def scene(made: Scene) -> None:
        made.weights.engines_expected = 3
        made.weights.start_s = 0.05
        with pytest.raises(DeadlineExceeded, match=r"3 engines to register \(registered: engine-0, engine-1"):
            await hold(made, 0)
        made.weights.start_s = 10.0
        holding = asyncio.ensure_future(hold(made, 0))
        await asyncio.sleep(0.01)
        made.router.join(made.engines[0].info.__class__("engine-2", made.engines[0].url, "fake-key", 1))
        made.weights.joined(made.router.engine("engine-2"))
        assert [engine.engine_id for engine in (await holding).engines] == ["engine-0", "engine-1", "engine-2"]

    play(scene)


def test_a_hold_without_any_engine_left_is_refused():
    async def scene(made: Scene) -> None:
        await sync(made, 0)
        await made.batch(0)
        for engine in made.engines:
            made.router.leave(engine.engine_id, "gone")
        with pytest.raises(HoldError, match=r"no engine is left to hold: .*gone"):
            await hold(made, 1)
        assert not made.weights.busy

    play(scene)
