"""Groups that teach nothing are replaced: the batch is full of others, the books balance, and the search has an end."""

import random
from collections.abc import Callable

import pytest
from scene import Scene
from test_scheduler import of_group, play, requests

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored
from slimerl.rollout.scheduler import RolloutStopped
from slimerl.samples.sample import Sample
from slimerl.samples.store import SampleStore, StoreError

RIGHT, WRONG = Scored(1.0, True), Scored(0.0, False)


def by_group(kinds: Callable[[int], list[Outcome]]) -> Callable[[RewardRequest], Outcome]:
    """The outcome of an answer by the place of its group in the order of their judging, and its own in the group."""
    order: dict[str, int] = {}

    def verdict(request: RewardRequest) -> Outcome:
        group, _, number = request.sample_id.rpartition("/")
        return kinds(order.setdefault(group, len(order)))[int(number)]

    return verdict


def test_r4_groups_all_right_or_all_wrong_are_replaced_and_counted():
    async def scene(made: Scene) -> None:
        kinds = [[RIGHT] * 3, [RIGHT, WRONG, WRONG], [WRONG] * 3, [WRONG] * 3, [RIGHT, RIGHT, WRONG]]
        made.reward.verdict = by_group(lambda place: kinds[place])
        await made.serve(0)
        manifest = await made.batch(0)
        await made.settled()
        assert list(of_group(manifest).values()) == [3, 3]
        assert sorted(sample.correct for sample in manifest.samples) == [False] * 3 + [True] * 3
        counts = made.store.counts()
        assert counts.dropped == {"group_all_right": 3, "group_all_wrong": 6}
        assert counts.admitted == 15 == requests(made), "as many groups as were needed, and no more"
        metrics = manifest.metrics
        assert metrics["rollout/replaced_groups"] == 3
        assert metrics["rollout/dropped_group_all_wrong"] == 6
        assert metrics["rollout/accuracy"] == 1 / 2
        assert metrics["rollout/accuracy_with_replaced"] == pytest.approx(6 / 15)

    play(scene, dynamic_sampling_rounds=4)


def test_r4_rewards_that_differ_among_right_answers_do_not_save_a_group():
    """Fault: a length penalty, on which such a group would be trained for brevity alone."""

    async def scene(made: Scene) -> None:
        shaped: list[Outcome] = [Scored(1.0, True), Scored(0.6, True), Scored(0.2, True)]
        made.reward.verdict = by_group(lambda place: [RIGHT, RIGHT, WRONG] if place else shaped)
        await made.serve(0)
        manifest = await made.batch(0)
        assert made.store.counts().dropped == {"group_all_right": 3}
        assert manifest.metrics["rollout/uniform_groups_fraction"] == 0

    play(scene, groups=1, dynamic_sampling_rounds=2)


@pytest.mark.parametrize(
    ("outcome", "told"), [(WRONG, "4 all wrong, 0 not judged"), (Failed("timeout"), "0 all wrong, 4 not judged")]
)
def test_r4_when_nothing_passes_the_trainer_is_told_at_once_what_to_do(outcome, told):
    """Fault: every answer is wrong, or none can be judged; without a bound the rollout would search for ever."""

    async def scene(made: Scene) -> None:
        made.reward.verdict = lambda request: outcome
        await made.serve(0)
        with pytest.raises(RolloutStopped) as caught:
            await made.batch(0)
        assert "found 0 of 2 groups" in str(caught.value)
        assert told in str(caught.value)
        assert "algorithm.dynamic_sampling_rounds = 2" in str(caught.value)
        await made.settled()
        counts = made.store.counts()
        assert counts.running == counts.buffered == 0
        assert counts.admitted <= 3 * 5, "one more group was under way at most when the fourth reached the bound"

    play(scene, dynamic_sampling_rounds=2, on_reward_failure="zero")


def test_without_the_option_every_group_is_trained_on():
    async def scene(made: Scene) -> None:
        made.reward.verdict = lambda request: WRONG
        await made.serve(0)
        manifest = await made.batch(0)
        assert made.store.counts().dropped == {}
        assert "rollout/replaced_groups" not in manifest.metrics

    play(scene)


def test_a2_books_balance_and_staleness_holds_while_groups_are_replaced():
    """Fault: answers that are lost, rewards that fail, and groups that teach nothing, over many steps."""

    async def scene(made: Scene) -> None:
        chance = random.Random(3)
        outcomes: list[Outcome] = [*[RIGHT, WRONG] * 6, Failed("timeout")]
        made.reward.verdict = lambda request: chance.choice(outcomes)
        for engine in made.engines:
            engine.faults.extend(chance.choices([*[""] * 12, "500", "drop", "abort"], k=400))
        trained = replaced = 0
        for version in range(12):
            await made.serve(version)
            manifest = await made.batch(version)
            verdicts: dict[str, set[bool | None]] = {}
            for sample in manifest.samples:
                verdicts.setdefault(sample.group_id, set()).add(sample.correct)
                assert version - sample.oldest_version <= 1
            assert list(verdicts.values()) == [{True, False}] * 2
            made.scheduler.trained(manifest.batch_id)
            trained += len(manifest.samples)
            replaced += manifest.metrics["rollout/replaced_groups"]
            made.store.check()
        await made.settled()
        counts = made.store.counts()
        assert counts.trained == trained
        assert counts.running == 0
        assert counts.admitted == trained + counts.buffered + sum(counts.dropped.values())
        assert replaced > 0
        assert {"group_all_right", "group_all_wrong", "reward_timeout"} <= counts.dropped.keys()

    play(scene, size=3, staleness=1, dynamic_sampling_rounds=20)


def test_only_a_finished_group_that_nobody_trains_on_is_dropped_as_a_whole():
    store = SampleStore()
    sample = Sample("g/0", "g", "p", (1,))
    store.admit("g", [sample], version=0)
    with pytest.raises(StoreError, match="group g cannot be dropped as a whole"):
        store.drop_group("g", "why")
    store.start("g/0")
    sample.append([3], logprobs=[-1.0], version=0)
    store.generated("g/0")
    sample.reward = 0.0
    store.rewarded("g/0")
    store.lease("step-0", ["g"])
    with pytest.raises(StoreError, match="group g cannot be dropped as a whole"):
        store.drop_group("g", "why")
    store.give_back("step-0")
    store.drop_group("g", "why")
    assert store.counts().dropped == {"why": 1}
    assert store.unleased() == []
