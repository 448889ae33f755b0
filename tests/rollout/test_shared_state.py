"""A checkpoint of several rollout processes: with samples half made in all of them, for as many as go on."""

import asyncio
import re
from typing import Any

import pytest
from fake_engine import LONG, go_on
from ledger_scene import over_the_wire
from rollout_fleet import Fleet, fleet
from scene import PATIENCE_S, Scene, rollout

from slimerl.rewards.outcome import Failed, Scored
from slimerl.rollout import front, shared_state
from slimerl.rollout.admission import GateError
from slimerl.rollout.shard_scheduler import BEFORE
from slimerl.samples.ledger_messages import NO_ENGINE, Make, Void
from slimerl.samples.messages import BatchManifest, Path, RolloutState, SamplePayload, SavedGroup, unpack_array
from slimerl.samples.rows import DataError
from slimerl.samples.sample import SampleState
from slimerl.samples.store import StoreError
from slimerl.training.rollout_client import ServiceFailed

GROUPS, SIZE, STALENESS, STEPS = 2, 2, 4, 8
PROMPT, CHUNK = 2, 4
OPTIONS: dict[str, Any] = {
    "groups": GROUPS,
    "size": SIZE,
    "steps": STEPS,
    "chunk_tokens": CHUNK,
    "max_new_tokens": LONG,
}
Payloads = dict[str, SamplePayload]


def going_on(made: Fleet | Scene) -> None:
    for scene in made.scenes if isinstance(made, Fleet) else [made]:
        for engine in scene.engines:
            engine.answer = go_on


def payloads_of(made: Scene, manifest: BatchManifest) -> Payloads:
    return {each.sample_id: each for each in made.store.payloads(one.sample_id for one in manifest.samples)}


async def step_of(made: Fleet, step: int) -> Payloads:
    """Taken, trained, and told of as the trainer does."""
    trainer = await made.trainer()
    manifest = await asyncio.to_thread(trainer.next_batch, step, PATIENCE_S)
    ids = [each.sample_id for each in manifest.samples]
    shards = [manifest.shards[each.group_id] for each in manifest.samples]
    payloads = await asyncio.to_thread(trainer.fetch, ids, shards)
    assert step - 1 - min(each.oldest_version for each in manifest.samples) <= STALENESS, "test A1"
    await asyncio.to_thread(trainer.trained, manifest.batch_id, step)
    return {each.sample_id: each for each in payloads}


async def two_steps(made: Fleet) -> Payloads:
    """Steps 1 and 2 of what the first process makes; all that the second has stands still in its third chunk."""
    going_on(made)
    made.scenes[1].engines[0].stopped_at = PROMPT + 2 * CHUNK
    await made.update(0)
    trained = await step_of(made, 1)
    await made.update(1)
    trained |= await step_of(made, 2)
    half_made = SIZE * GROUPS * (STALENESS + 2) // 2
    await made.scenes[0].until(lambda: len(made.scenes[1].engines[0].waiting) == half_made)
    await made.scenes[0].until(lambda: made.desk.ledger.books.ready() == GROUPS)
    return trained


def versions_of(payload: SamplePayload) -> list[int]:
    return unpack_array(payload.versions, "int32").tolist()


def whole_run() -> Payloads:
    """Of an only process that nothing happens to."""

    async def run() -> Payloads:
        made: Scene
        found: Payloads = {}
        async with asyncio.timeout(60), rollout(engines=1, staleness=STALENESS, **OPTIONS) as made:
            going_on(made)
            for step in range(1, STEPS + 1):
                await made.serve(step - 1)
                manifest = await made.batch(step)
                found |= payloads_of(made, manifest)
                made.scheduler.trained(manifest.batch_id)
        return found

    return asyncio.run(run())


async def rest_of(made: Fleet) -> Payloads:
    found: Payloads = {}
    for step in range(3, STEPS + 1):
        await made.update(step - 1)
        found |= await step_of(made, step)
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_c1_a_run_of_two_processes_goes_on_with_what_both_had_half_made_in_any_number_of_processes(tmp_path, processes):
    """Injected: the run ends after step 2 at a staleness of 4, and goes on with another number of processes."""

    async def before(made: Fleet) -> tuple[Payloads, RolloutState]:
        trained = await two_steps(made)
        return trained, await asyncio.to_thread((await made.trainer()).state)

    async def after(made: Fleet) -> tuple[Payloads, list[int]]:
        going_on(made)
        trainer = await made.trainer()
        for _ in range(2):  # its answer is lost, and the trainer asks again
            await asyncio.to_thread(trainer.restore, over_the_wire(state, RolloutState))
        found = await rest_of(made)
        requests = [each for scene in made.scenes for each in scene.engines[0].requests]
        of_begun = [each for each in requests if re.split("[+#]", each["rid"])[0] in begun]
        asked = [len(each["input_ids"]) for each in of_begun]
        counts = made.desk.ledger.counts()
        assert counts.admitted == counts.trained == GROUPS * SIZE * STEPS
        return found, asked

    trained, state = fleet(before, tmp_path / "before", 2, STALENESS, **OPTIONS)
    begun = {each.payload.sample_id: each.payload for group in state.groups for each in group.begun}
    kept = {each.payload.sample_id: each.payload for group in state.groups for each in group.samples}
    assert (len(begun), len(kept)) == (SIZE * GROUPS * (STALENESS + 2) // 2, SIZE * GROUPS)
    found, asked = fleet(after, tmp_path / "after", processes, STALENESS, **OPTIONS)
    assert found.keys().isdisjoint(trained), "nothing is trained twice"
    expected = whole_run()
    assert {name: each.tokens for name, each in (trained | found).items()} == {
        name: each.tokens for name, each in expected.items()
    }
    assert {name: found[name] for name in kept} == kept
    assert asked == [PROMPT + 2 * CHUNK] * len(begun), "only what is missing is generated"
    for name, payload in begun.items():
        versions = versions_of(found[name])
        assert versions[: 2 * CHUNK] == versions_of(payload)
        assert versions == sorted(versions)
        assert versions[2 * CHUNK] >= state.steps, "versions go on"


def test_c1_an_only_process_goes_on_with_what_two_had_half_made(tmp_path):
    async def before(made: Fleet) -> tuple[Payloads, RolloutState]:
        trained = await two_steps(made)
        return trained, await made.front.state()

    async def after() -> Payloads:
        found: Payloads = {}
        async with asyncio.timeout(60), rollout(engines=1, staleness=STALENESS, **OPTIONS) as made:
            going_on(made)
            made.scheduler.restore(over_the_wire(state, RolloutState))
            for step in range(3, STEPS + 1):
                await made.serve(step - 1)
                manifest = await made.batch(step)
                found |= payloads_of(made, manifest)
                made.scheduler.trained(manifest.batch_id)
            assert made.store.counts().admitted == GROUPS * SIZE * STEPS
        return found

    trained, state = fleet(before, tmp_path, 2, STALENESS, **OPTIONS)
    found = asyncio.run(after())
    assert len(found) + len(trained) == GROUPS * SIZE * STEPS
    assert found.keys().isdisjoint(trained)


def test_c1_a_checkpoint_waits_for_a_process_that_is_gone_no_longer_than_it_may_and_its_samples_are_made_again(
    tmp_path, monkeypatch
):
    """Injected: the second process is killed before the checkpoint, and no other comes in time."""
    monkeypatch.setattr(shared_state, "SHARE_S", 0.3)

    async def before(made: Fleet) -> tuple[Payloads, RolloutState]:
        trained = await two_steps(made)
        await made.end(1)
        return trained, await made.front.state()

    async def after(made: Fleet) -> Payloads:
        going_on(made)
        await made.front.restore(over_the_wire(state, RolloutState))
        return await rest_of(made)

    trained, state = fleet(before, tmp_path / "before", 2, STALENESS, **OPTIONS)
    assert [group.group_id for group in state.groups if group.begun] == []
    assert sum(len(group.samples) for group in state.groups) == GROUPS * SIZE, "of the first process"
    found = fleet(after, tmp_path / "after", 2, STALENESS, **OPTIONS)
    assert found.keys().isdisjoint(trained)
    assert {name: each.tokens for name, each in (trained | found).items()} == {
        name: each.tokens for name, each in whole_run().items()
    }


async def one_lost_and_one_unjudged(request: Any) -> Any:
    """Of each group sample 1 is lost, and sample 2 not judged."""
    if request.sample_id.endswith("/2"):
        await asyncio.Event().wait()
    return Failed("timeout", "") if request.sample_id.endswith("/1") else Scored(1.0, True)


def test_a2_what_a_group_had_lost_before_a_restart_counts_once_it_is_whole(tmp_path):
    """Injected: the run ends while each group has a sample that was dropped, and one that is not judged."""
    options = {"groups": 2, "size": 4, "steps": 1}

    async def before(made: Fleet) -> RolloutState:
        for scene in made.scenes:
            scene.reward.score = one_lost_and_one_unjudged
        await made.serve(0)
        for scene in made.scenes:
            await scene.until(lambda store=scene.store: store.in_state(SampleState.REWARDED) == 2)
            await scene.until(lambda store=scene.store: store.in_state(SampleState.GENERATED) == 1)
            await scene.until(lambda store=scene.store: store.counts().dropped == {"reward_timeout": 1})
        return await made.front.state()

    async def after(made: Fleet) -> None:
        await made.front.restore(over_the_wire(state, RolloutState))
        await made.serve(0)
        manifest, _ = await made.take(1)
        assert len(manifest.samples) == 2 * 3
        await made.desk.trained(1)
        counts = made.desk.ledger.counts()
        assert (counts.admitted, counts.trained, counts.dropped) == (8, 6, {BEFORE: 2})
        assert all(not scene.engines[0].requests for scene in made.scenes), "what was generated is judged alone"

    state = fleet(before, tmp_path / "before", 2, **options)
    fleet(after, tmp_path / "after", 2, **options)


@pytest.mark.parametrize("given_back", [False, True])
def test_what_the_ledger_has_given_to_others_is_no_sign_that_nothing_comes_of_groups(given_back):
    """Fault: a process that was not heard of for long, or has no engine left, has more groups taken from it than would
    end a run by failing."""

    async def run() -> None:
        async with asyncio.timeout(30), rollout(engines=1, groups=1, size=2, steps=100, shard=0) as made:
            scheduler: Any = made.scheduler
            made.engines[0].open.clear()
            await made.serve(0)
            for order in (Make(position, 0) for position in range(12)):
                scheduler.link._note(order)
                scheduler.carry_out(order)
            await made.engines[0].running_requests(24)
            if given_back:
                made.router.quarantine("engine-0", "injected")
                assert scheduler.offer() == NO_ENGINE
            for position in range(0 if given_back else 12):
                scheduler.carry_out(Void(position))
            await made.settled()
            assert scheduler.stopped == ""
            assert made.store.counts().running == 0

    asyncio.run(run())


def test_a_state_that_does_not_fit_is_refused_and_says_why(tmp_path):
    async def before(made: Fleet) -> RolloutState:
        await two_steps(made)
        return await made.front.state()

    async def after(made: Fleet) -> None:
        with pytest.raises(GateError, match=r"group refused: .* with max_staleness 1"):
            await made.front.restore(over_the_wire(state, RolloutState))
        gone = SavedGroup("0/gone", 0, ["0/gone/0", "0/gone/1"], [])
        with pytest.raises(DataError, match="groups 0/gone were begun before, but"):
            await made.front.restore(RolloutState(0, 1, 0, {}, {}, [gone]))
        await made.serve(0)
        await made.scenes[0].until(lambda: made.desk.ledger.books.cursor > 0)
        with pytest.raises(StoreError, match="groups were admitted already"):
            await made.front.restore(RolloutState(2, 4, 8, {}, {}, []))

    state = fleet(before, tmp_path / "before", 2, STALENESS, **OPTIONS)
    fleet(after, tmp_path / "after", 2, 1, **OPTIONS)


def test_c1_a_state_may_be_as_large_as_what_waits_for_the_trainer(tmp_path):
    """Injected: no state, but more bytes than any other message has; they are read all the same."""

    async def act(made: Fleet) -> None:
        trainer = await made.trainer()
        with pytest.raises(ServiceFailed, match="refused with 400"):
            await asyncio.to_thread(trainer._call, "POST", Path.RESTORE, bytes(70 * 2**20), PATIENCE_S)

    fleet(act, tmp_path, 1)


def test_c1_what_was_ordered_anew_while_its_part_of_the_checkpoint_was_on_the_way_is_made_as_it_was_ordered(
    tmp_path, monkeypatch
):
    """Injected: the second process ends before it can take its part; the one in its place says that it has nothing."""

    async def before(made: Fleet) -> tuple[Payloads, RolloutState]:
        trained = await two_steps(made)
        return trained, await made.front.state()

    async def after(made: Fleet) -> Payloads:
        going_on(made)
        scheduler: Any = made.scenes[1].scheduler

        async def too_late(calls: Any, process: int, share: RolloutState, deadline: Any) -> None:
            scheduler.link.fenced(scheduler.link.incarnation, scheduler.link.incarnation)
            scheduler.news()
            await made.scenes[1].until(lambda: len(scheduler.link.held) > len(share.groups))
            await shared_state.give_share(calls, process, share, deadline)

        monkeypatch.setattr(front, "give_share", too_late)
        await made.front.restore(over_the_wire(state, RolloutState))
        return await rest_of(made)

    trained, state = fleet(before, tmp_path / "before", 2, STALENESS, **OPTIONS)
    found = fleet(after, tmp_path / "after", 2, STALENESS, **OPTIONS)
    assert found.keys().isdisjoint(trained)
    assert {name: each.tokens for name, each in (trained | found).items()} == {
        name: each.tokens for name, each in whole_run().items()
    }
