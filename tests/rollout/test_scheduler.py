"""The scheduler: staleness gated at dispatch, no sample lost, no task that can stop the loop."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from fake_engine import hashed_tokens
from scene import SEED, Scene, rollout

from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable
from slimerl.rollout.loop_lag import LoopLag
from slimerl.rollout.prompts import sampling_seed
from slimerl.rollout.scheduler import RolloutStopped
from slimerl.rollout.service import NoEngine
from slimerl.rollout.weights import HoldError
from slimerl.samples.messages import BatchManifest, unpack_array
from slimerl.samples.store import GROUP_TOO_SMALL

Play = Callable[[Scene], Coroutine[Any, Any, None]]


def play(scene: Play, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), rollout(**options) as made:
            await scene(made)

    asyncio.run(run())


def requests(scene: Scene) -> int:
    return sum(len(engine.requests) for engine in scene.engines)


def of_group(manifest: BatchManifest) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for sample in manifest.samples:
        sizes[sample.group_id] = sizes.get(sample.group_id, 0) + 1
    return sizes


def test_a_batch_holds_whole_groups_with_tokens_as_the_engine_gave_them():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        manifest = await made.batch(0)
        assert list(of_group(manifest).values()) == [3, 3]
        assert manifest.step == 0
        for meta, payload in zip(
            manifest.samples, made.store.payloads([one.sample_id for one in manifest.samples]), strict=True
        ):
            tokens = unpack_array(payload.tokens, "int32").tolist()
            prompt, response = tokens[:2], tokens[2:]
            assert response == hashed_tokens(prompt, sampling_seed(SEED, meta.sample_id, 0))
            assert response[-1] == 2, "the stop token belongs to the response"
            assert unpack_array(payload.behavior_logprobs, "float32") == pytest.approx(
                [-0.5 - token / 1000 for token in response]
            )
            assert unpack_array(payload.versions, "int32").tolist() == [0] * len(response)
            assert (meta.finish_reason, meta.reward, meta.correct) == ("stop", 1.0, True)

    play(scene)


def test_a1_staleness_0_is_synchronous():
    """Fault: a scheduler that runs ahead; engines must see one batch per version and not one request more."""

    async def scene(made: Scene) -> None:
        await asyncio.sleep(0.02)
        assert requests(made) == 0, "nothing may start before the first weights"
        for version in range(3):
            await made.serve(version)
            manifest = await made.batch(version)
            await made.settled()
            assert requests(made) == 6 * (version + 1)
            assert {sample.oldest_version for sample in manifest.samples} == {version}
            assert manifest.metrics["rollout/staleness_max"] == 0
            made.scheduler.trained(manifest.batch_id)

    play(scene)


def test_a1_staleness_1_runs_one_batch_ahead_and_no_further():
    async def scene(made: Scene) -> None:
        for version in range(3):
            await made.serve(version)
            manifest = await made.batch(version)
            expected = 6 * (version + 2)
            await made.until(partial(lambda count: requests(made) >= count, expected))
            await made.settled()
            assert requests(made) == expected
            assert manifest.metrics["rollout/staleness_max"] == (1 if version else 0)

    play(scene, staleness=1)


def test_groups_beyond_the_engines_room_wait_here():
    async def scene(made: Scene) -> None:
        made.engines[0].open.clear()
        await made.serve(0)
        await made.engines[0].running_requests(3)
        await made.until(lambda: made.store.counts().admitted == 24)
        assert len(made.scheduler.dispatcher.order) == 21
        made.engines[0].open.set()
        await made.batch(0)
        assert made.engines[0].most_running == 3

    play(scene, engines=1, capacity=3, staleness=3)


def test_a2_books_balance_through_a_storm_of_faults():
    """Fault: engines that refuse, break and abort, rewards that fail, over many steps."""

    async def scene(made: Scene) -> None:
        chance = random.Random(1)
        outcomes: list[Outcome] = [*[Scored(1.0, True), Scored(0.0, False), Unparsable()] * 3, Failed("timeout")]
        made.reward.verdict = lambda request: chance.choice(outcomes)
        for engine in made.engines:
            engine.faults.extend(chance.choices([*[""] * 8, "500", "drop", "400", "abort", "empty"], k=400))
        trained = 0
        for version in range(12):
            await made.serve(version)
            manifest = await made.batch(version)
            assert len(of_group(manifest)) == 2
            assert min(of_group(manifest).values()) >= 2
            made.scheduler.trained(manifest.batch_id)
            trained += len(manifest.samples)
            made.store.check()
        await made.settled()
        counts = made.store.counts()
        assert counts.trained == trained
        assert counts.running == 0
        assert counts.admitted == counts.trained + counts.buffered + sum(counts.dropped.values())
        assert counts.dropped[GROUP_TOO_SMALL] > 0
        assert counts.dropped["generation_refused"] > 0
        assert counts.dropped["reward_timeout"] > 0

    play(scene, size=4, staleness=1)


def test_a_replayed_run_draws_the_same_tokens_whatever_fails_and_however_many_engines():
    def tokens(engines: int, faults: list[str]) -> dict[str, bytes]:
        drawn: dict[str, bytes] = {}

        async def scene(made: Scene) -> None:
            made.engines[0].faults.extend(faults)
            for version in range(2):
                await made.serve(version)
                ids = [sample.sample_id for sample in (await made.batch(version)).samples]
                drawn.update({payload.sample_id: payload.tokens for payload in made.store.payloads(ids)})

        play(scene, engines=engines)
        return drawn

    assert tokens(1, []) == tokens(3, ["500", "drop", "abort"])


def test_a_group_that_loses_a_sample_goes_on_and_one_that_loses_more_is_replaced():
    async def scene(made: Scene) -> None:
        made.engines[0].faults.extend(["400", "", "", "400", "400", ""])
        await made.serve(0)
        manifest = await made.batch(0)
        assert sorted(of_group(manifest).values()) == [2, 3]
        assert made.store.counts().dropped == {"generation_refused": 3, GROUP_TOO_SMALL: 1}
        assert manifest.metrics["rollout/dropped"] == 4
        assert manifest.metrics["rollout/dropped_generation_refused"] == 3
        await made.serve(1)
        assert (await made.batch(1)).metrics["rollout/dropped"] == 0

    play(scene, engines=1)


def test_a6_cancelled_tasks_are_outcomes_and_their_slots_come_back():
    """Fault: tasks of samples cancelled while running, while waiting, and before their first step."""

    async def scene(made: Scene) -> None:
        made.engines[0].open.clear()
        await made.serve(0)
        await made.engines[0].running_requests(2)
        for task in list(made.scheduler._tasks.values()):
            task.cancel()
        admit = made.scheduler._admit

        def admit_and_cancel(drawn):
            admit(drawn)
            for task in made.scheduler._tasks.values():
                task.cancel()
            made.scheduler._admit = admit

        made.scheduler._admit = admit_and_cancel
        made.engines[0].open.set()
        manifest = await made.batch(0)
        assert list(of_group(manifest).values()) == [3, 3]
        assert made.store.counts().dropped["cancelled"] >= 6
        await made.settled()

    play(scene, engines=1, capacity=2)


def test_a6_a_bug_while_judging_costs_the_sample_and_not_the_loop():
    async def scene(made: Scene) -> None:
        calls = 0

        def verdict(request: RewardRequest) -> Outcome:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ZeroDivisionError
            return Scored(1.0, True)

        made.reward.verdict = verdict
        await made.serve(0)
        await made.batch(0)
        assert made.store.counts().dropped["internal_error"] == 1

    play(scene)


def judged_by_number(outcomes: list[Outcome]) -> Callable[[RewardRequest], Outcome]:
    """Outcome of the sample with that number in its group."""
    return lambda request: outcomes[int(request.sample_id.rpartition("/")[2])]


def test_r2_wrong_unparsable_and_failed_are_told_apart():
    async def scene(made: Scene) -> None:
        made.reward.verdict = judged_by_number([Scored(1.0, True), Scored(0.0, False), Unparsable(), Failed("timeout")])
        await made.serve(0)
        manifest = await made.batch(0)
        assert [(sample.reward, sample.correct) for sample in manifest.samples] == [
            (1.0, True),
            (0.0, False),
            (0.0, False),
        ]
        assert manifest.metrics["rollout/accuracy"] == pytest.approx(1 / 3)
        assert manifest.metrics["rollout/unparsable_fraction"] == pytest.approx(1 / 3)
        assert manifest.metrics["rollout/dropped_reward_timeout"] == 1

    play(scene, groups=1, size=4)


def test_r2_a_failed_reward_may_count_as_0_but_never_as_a_wrong_answer():
    async def scene(made: Scene) -> None:
        made.reward.verdict = judged_by_number([Scored(1.0, True), Failed("timeout"), Scored(0.0, False)])
        await made.serve(0)
        manifest = await made.batch(0)
        assert [sample.correct for sample in manifest.samples] == [True, None, False]
        assert manifest.metrics["rollout/accuracy"] == 0.5
        assert manifest.metrics["rollout/reward_failed_fraction"] == pytest.approx(1 / 3)

    play(scene, groups=1, on_reward_failure="zero")


def test_the_manifest_says_what_the_rollout_measured():
    async def scene(made: Scene) -> None:
        made.reward.verdict = judged_by_number([Scored(1.0, True), Scored(0.0, False), Scored(0.0, False)])
        for engine in made.engines:
            engine.delay_s = 0.05
        await made.serve(0)
        manifest = await made.batch(0)
        lengths = [sample.response_length for sample in manifest.samples]
        metrics = manifest.metrics
        assert metrics["rollout/generated_tokens"] == sum(lengths)
        assert metrics["rollout/mean_response_tokens"] == pytest.approx(sum(lengths) / 6)
        assert metrics["rollout/truncated_fraction"] == sum(length == 4 for length in lengths) / 6 > 0
        assert 0.05 <= metrics["rollout/seconds"] < 5
        assert metrics["rollout/tokens_per_s"] == pytest.approx(sum(lengths) / metrics["rollout/seconds"])
        assert 0 <= metrics["rollout/reward_seconds"] < 1
        assert metrics["rollout/mean_reward"] == pytest.approx(1 / 3)
        assert metrics["rollout/uniform_groups_fraction"] == 0

    play(scene, max_new_tokens=4)


def test_the_same_batch_is_handed_out_again_until_it_is_trained():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        first = await made.batch(0)
        assert (await made.batch(0)).samples == first.samples
        assert requests(made) == 6

    play(scene)


def test_a3_a_batch_that_does_not_come_says_what_it_waits_for():
    async def scene(made: Scene) -> None:
        made.engines[0].open.clear()
        await made.serve(0)
        await made.engines[0].running_requests(6)
        with pytest.raises(DeadlineExceeded) as caught:
            await made.batch(0, timeout_s=0.05)
        assert "waited 0.05 s for the batch of step 0 (0 of 2 groups ready, 2 under way; requests running: 6" in str(
            caught.value
        )
        made.engines[0].open.set()

    play(scene, engines=1)


def test_a_batch_before_the_first_weights_is_refused():
    async def scene(made: Scene) -> None:
        with pytest.raises(HoldError, match="no weights have been released yet"):
            await made.batch(0)

    play(scene)


def test_a3_without_an_engine_left_the_trainer_is_told_at_once():
    """Fault: every engine dies while a batch is awaited."""

    async def scene(made: Scene) -> None:
        await made.serve(0)
        for engine in made.engines:
            engine.open.clear()
        await made.engines[0].running_requests(2)
        waiting = asyncio.ensure_future(made.batch(0, timeout_s=1000))
        for engine in made.engines:
            engine.healthy = False
            await engine.stop()
        with pytest.raises(NoEngine, match=r"no engine serves version 0: engine-0 is dead: .*; engine-1 is dead"):
            await waiting
        assert made.router.running() == []
        made.store.check()

    play(scene)


def test_the_run_stops_when_group_after_group_comes_to_nothing():
    async def scene(made: Scene) -> None:
        made.reward.verdict = lambda request: Failed("timeout")
        await made.serve(0)
        with pytest.raises(RolloutStopped, match=r"8 groups in a row came to nothing; .* reward_timeout"):
            await made.batch(0)
        await made.settled()

    play(scene)


def test_no_more_batches_than_the_run_has_steps():
    async def scene(made: Scene) -> None:
        await made.serve(0)
        await made.batch(0)
        await made.serve(1)
        await made.settled()
        assert requests(made) == 6
        with pytest.raises(RolloutStopped, match="all 1 batches"):
            await made.batch(1)

    play(scene, steps=1, staleness=2)


def test_a8_work_on_the_event_loop_is_measured_and_told():
    """Fault: something keeps the event loop busy for a quarter of a second."""

    async def scene() -> None:
        lag = LoopLag()
        async with rollout(lag=lag) as made:
            watching = asyncio.ensure_future(lag.watch())
            await made.serve(0)
            await asyncio.sleep(0.1)
            time.sleep(0.25)
            await asyncio.sleep(0.1)
            assert 0.15 < (await made.batch(0)).metrics["rollout/event_loop_lag_s"] < 1
            assert (await made.batch(0)).metrics["rollout/event_loop_lag_s"] < 0.1
            watching.cancel()

    asyncio.run(scene())
