"""Several rollout processes under one ledger, over real HTTP: they make what one process would have made."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ledger_scene import over_the_wire
from rollout_fleet import GROUPS, LEASE_S, PATIENCE_S, SIZE, STEPS, Fleet, Made, fleet, listen, next_batch, told_by
from scene import Scene, rollout

from slimerl.resilience.deadline import Deadline
from slimerl.rewards.outcome import Failed, Scored
from slimerl.rollout import front
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.journal_file import JournalFile, read_journal
from slimerl.rollout.ledger_desk import LedgerDesk, open_ledger
from slimerl.rollout.service import NoEngine
from slimerl.samples.books import StoreError
from slimerl.samples.messages import NextBatchRequest, RolloutState, ServiceAddress
from slimerl.training.rollout_client import RolloutClient, ServiceFailed
from slimerl.training.several_rollouts import SeveralRollouts


async def train(made: Fleet) -> list[Made]:
    batches = []
    for step in range(1, STEPS + 1):
        await made.serve(step - 1)
        manifest, payloads = await made.take(step)
        batches.append(payloads)
        assert set(manifest.shards.values()) == set(range(len(made.scenes))), "each has its share"
        await made.desk.trained(step)
    return batches


def single(staleness: int = 0) -> list[Made]:
    async def run() -> list[Made]:
        batches = []
        options = {"engines": 1, "groups": GROUPS, "size": SIZE, "staleness": staleness, "steps": STEPS}
        async with asyncio.timeout(60), rollout(**options) as made:
            for step in range(1, STEPS + 1):
                await made.serve(step - 1)
                manifest = await made.batch(step)
                payloads = made.store.payloads([each.sample_id for each in manifest.samples])
                batches.append({each.sample_id: (each.tokens, each.versions) for each in payloads})
                made.scheduler.trained(manifest.batch_id)
        return batches

    return asyncio.run(run())


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a2_however_many_processes_there_are_the_trainer_gets_the_same_samples(tmp_path, shards):
    async def act(made: Fleet) -> list[Made]:
        batches = await train(made)
        await made.scenes[0].until(lambda: all(scene.store.counts().buffered == 0 for scene in made.scenes))
        books = [scene.store.counts() for scene in made.scenes]
        whole = made.desk.ledger.counts()
        assert sum(each.trained for each in books) == whole.trained == GROUPS * SIZE * STEPS
        assert sum(each.admitted for each in books) == whole.admitted == whole.trained
        assert whole.dropped == {}
        return batches

    batches = fleet(act, tmp_path, shards)
    expected = single()
    assert [list(each) for each in batches] == [list(each) for each in expected], "in the same order"
    assert batches == expected


def test_a2_a_process_that_ends_costs_no_sample_for_another_makes_its_groups(tmp_path):
    """Fault: one of two processes ends with groups under way, and does not come back."""

    async def act(made: Fleet) -> list[Made]:
        await made.serve(0)
        _, first = await made.take(1)
        await made.desk.trained(1)
        for engine in made.scenes[1].engines:
            engine.open.clear()
        await made.serve(1)
        await made.scenes[1].engines[0].running_requests(GROUPS // 2 * SIZE)
        await made.end(1)
        del made.scenes[1]
        manifest, second = await made.take(2)
        assert set(manifest.shards.values()) == {0}
        await made.desk.trained(2)
        await made.serve(2)
        _, third = await made.take(3)
        return [first, second, third]

    assert fleet(act, tmp_path, 2) == single()


def test_what_the_ledger_hears_is_no_news_for_it(tmp_path):
    """Fault: the first process would report that it was reported to, and so on without end."""

    async def act(made: Fleet) -> None:
        front, told = made.front, list[str]()
        front.news = lambda: told.append("news")
        await made.desk.tell()
        assert told == []
        assert front._progress.is_set(), "whoever waits for a batch looks again"

    fleet(act, tmp_path, 1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_c1_a_run_that_goes_on_from_its_state_gets_what_it_would_have_got(tmp_path, staleness):
    async def before(made: Fleet) -> tuple[RolloutState, Made]:
        await made.serve(0)
        _, payloads = await made.take(1)
        with pytest.raises(StoreError, match=r"batch \[1\] is out; save after it was trained"):
            await made.front.state()
        await made.desk.trained(1)
        return await made.front.state(), payloads

    async def after(made: Fleet) -> list[Made]:
        for _ in range(2):  # also told again, where the answer was lost
            await made.front.restore(over_the_wire(state, RolloutState))
        found = []
        for step in range(2, STEPS + 1):
            await made.serve(step - 1)
            _, payloads = await made.take(step)
            found.append(payloads)
            await made.desk.trained(step)
        counts = made.desk.ledger.counts()
        assert counts.admitted == counts.trained == GROUPS * SIZE * STEPS
        return found

    state, first = fleet(before, tmp_path / "before", 2, staleness)
    assert len(state.groups) == staleness * GROUPS
    found = fleet(after, tmp_path / "after", 2, staleness)
    if staleness == 0:
        assert [first, *found] == single()
    else:  # which groups are ready first is chance; each is trained once all the same
        ids = sorted(sample_id for each in (first, *found) for sample_id in each)
        assert ids == sorted(sample_id for each in single() for sample_id in each)


def test_a_ledger_that_starts_again_goes_on_where_the_one_before_ended(tmp_path):
    async def run() -> None:
        async def opened() -> LedgerDesk:
            gate = StalenessGate(GROUPS, 0, STEPS)
            return await open_ledger(tmp_path / "ledger", gate, SIZE, 1, LEASE_S, PATIENCE_S)

        async with asyncio.timeout(60), rollout(engines=1, groups=GROUPS, size=SIZE, steps=STEPS, shard=0) as scene:
            made = []
            desk = await opened()
            for step in range(1, STEPS + 1):
                line = asyncio.ensure_future(told_by(scene, desk.hear))
                await scene.serve(step - 1)
                await desk.advance(step - 1)
                manifest = await next_batch(desk, step)
                line.cancel()
                await asyncio.gather(line, return_exceptions=True)
                before = desk.ledger.counts()
                desk.close()
                desk = await opened()
                assert desk.ledger.counts() == before
                again = await next_batch(desk, step)
                assert again == manifest, "the batch is still out"
                made.append([each.sample_id for each in again.samples])
                await desk.trained(step)
            desk.close()
            assert made == [list(each) for each in single_ids]

    single_ids = single()
    asyncio.run(run())


def test_a_process_that_does_not_answer_is_named():
    first, second = (ServiceAddress(f"http://127.0.0.1:{port}", "token", 1) for port in (9, 10))
    client = SeveralRollouts(first, 1.0, [RolloutClient(second, 1.0)])
    with pytest.raises(ServiceFailed, match=r"/samples/fetch: the rollout role at 127.0.0.1:10 cannot be reached"):
        client.fetch(["a"], [1])


def test_a2_a_process_that_is_killed_and_comes_back_in_time_keeps_what_its_journal_has(tmp_path):
    """Fault: killed with some groups ready and others under way."""

    async def process(desk: LedgerDesk, incarnation: int, act: Callable[[Scene], Coroutine[Any, Any, Any]]) -> Any:
        options = {"engines": 1, "groups": GROUPS, "size": SIZE, "steps": STEPS}
        async with rollout(**options, shard=0) as scene:
            scheduler: Any = scene.scheduler
            scheduler.link.incarnation = incarnation
            journal = scheduler.journal = JournalFile(tmp_path / "journal")
            if (recovered := read_journal(tmp_path / "journal")) is not None:
                scheduler.recover(recovered)
            else:
                journal.begin(scheduler.books())
            journal.publish()
            line = asyncio.ensure_future(told_by(scene, desk.hear))
            try:
                return await act(scene)
            finally:
                line.cancel()
                await asyncio.gather(line, return_exceptions=True)
                await journal.written()
                await scheduler.close()
                journal.close()

    async def step(desk: LedgerDesk, scene: Scene, number: int) -> list[str]:
        manifest = await next_batch(desk, number)
        ids = [each.sample_id for each in manifest.samples]
        made[number] = {each.sample_id: (each.tokens, each.versions) for each in scene.store.payloads(ids)}
        await desk.trained(number)
        return ids

    async def run() -> None:
        desk = await open_ledger(tmp_path / "ledger", StalenessGate(GROUPS, 0, STEPS), SIZE, 1, 60.0, PATIENCE_S)

        async def before(scene: Scene) -> None:
            await scene.serve(0)
            await desk.advance(0)
            await step(desk, scene, 1)
            second = {
                scene.scheduler.prompts.at(position).prompt.tokens[1] for position in range(GROUPS + 2, 2 * GROUPS)
            }
            scene.engines[0].stops = lambda tokens: tokens[1] in second
            await scene.serve(1)
            await desk.advance(1)
            await scene.until(lambda: desk.ledger.books.ready() == 2)

        async def after(scene: Scene) -> None:
            await scene.serve(1)
            for number in (2, 3):
                await step(desk, scene, number)
                if number == 2:
                    assert scene.engines[0].calls["/generate"] == 2 * SIZE, "what was ready is not made again"
                    await scene.serve(2)
                    await desk.advance(2)

        async with asyncio.timeout(60):
            await process(desk, 1, before)
            await process(desk, 2, after)
        desk.close()

    made: dict[int, Made] = {}
    asyncio.run(run())
    assert list(made.values()) == single()


def test_what_was_counted_of_a_group_that_came_to_nothing_is_told_with_the_next(tmp_path):
    """Injected: no answer to the first prompt can be judged."""

    async def act(made: Fleet) -> None:
        scene = made.scenes[0]
        first = scene.scheduler.prompts.at(0).prompt.answer
        scene.reward.verdict = lambda request: Failed("timeout", "") if request.answer == first else Scored(1.0, True)
        await made.serve(0)
        manifest, _ = await made.take(1)
        assert manifest.metrics["reward/failed_timeout"] == SIZE
        assert manifest.metrics["reward/correct"] == GROUPS * SIZE

    fleet(act, tmp_path, 1)


def test_a5_a_fetch_goes_on_at_the_process_that_follows_one_that_ended_in_the_middle_of_it(tmp_path):
    """Fault: of two processes the second ends before it has given what it holds; another comes in its place."""

    async def act(made: Fleet) -> None:
        await made.serve(0)
        manifest = await next_batch(made.desk, 1)
        deadline = Deadline("the rollout processes", PATIENCE_S)
        connected = SeveralRollouts.connect_all, made.run_dir, deadline, PATIENCE_S, 2, PATIENCE_S
        trainer = await asyncio.to_thread(*connected)
        await made.runners[1].cleanup()
        ids = [each.sample_id for each in manifest.samples]
        shards = [manifest.shards[each.group_id] for each in manifest.samples]
        fetching = asyncio.ensure_future(asyncio.to_thread(trainer.fetch, ids, shards))
        made.scenes[1].service.token = "of the next"
        following = await listen(made.run_dir, 1, made.scenes[1].service)
        assert [each.sample_id for each in await fetching] == ids
        await following.cleanup()

    fleet(act, tmp_path, 2)


def lose_engine(scene: Scene) -> None:
    """As after an update that failed half-way."""
    scene.router.quarantine("engine-0", "injected")
    scene.scheduler.dispatcher.interrupt("engine-0")
    scene.scheduler.dispatcher.refresh()
    scene.service._progressed()


def test_a3_a_process_without_an_engine_gives_back_what_it_was_to_make(tmp_path):
    """Fault: the only engine of one of two processes is quarantined while it has requests."""

    async def act(made: Fleet) -> list[Made]:
        (engine,) = made.scenes[1].engines
        engine.open.clear()
        await made.serve(0)
        await engine.running_requests(GROUPS // 2 * SIZE)
        lose_engine(made.scenes[1])
        manifest, first = await made.take(1)
        assert set(manifest.shards.values()) == {0}
        await made.desk.trained(1)
        engine.open.set()
        batches = [first]
        for step in (2, 3):
            for scene in made.scenes:
                await scene.serve(step - 1)
            made.scenes[1].service._progressed()
            await scene.until(lambda: made.desk.heard[1].room > 0)
            await made.desk.advance(step - 1)
            manifest, payloads = await made.take(step)
            assert set(manifest.shards.values()) == {0, 1}, "it makes its share again once it can"
            batches.append(payloads)
            await made.desk.trained(step)
        return batches

    assert fleet(act, tmp_path, 2) == single()


def test_a3_where_no_process_has_an_engine_left_the_trainer_is_told_soon(tmp_path, monkeypatch):
    """Fault: the engines of all are quarantined; after the next sync they serve again."""
    monkeypatch.setattr(front, "HOPELESS_S", 0.3)

    async def act(made: Fleet) -> None:
        for scene in made.scenes:
            scene.engines[0].open.clear()
        await made.serve(0)
        for scene in made.scenes:
            await scene.engines[0].running_requests(GROUPS // 2 * SIZE)
            lose_engine(scene)
        with pytest.raises(NoEngine, match=r"no rollout process has an engine that serves, for 0\.3 s"):
            await made.front.next_batch(NextBatchRequest(1, PATIENCE_S))
        assert all(scene.store.counts().running == 0 for scene in made.scenes)
        for scene in made.scenes:
            scene.engines[0].open.set()
        await made.serve(0)
        for scene in made.scenes:
            scene.service._progressed()
        assert len((await made.take(1))[0].samples) == GROUPS * SIZE

    fleet(act, tmp_path, 2)
