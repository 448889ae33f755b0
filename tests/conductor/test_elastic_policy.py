"""Engines by load: what a waiting trainer brings, what idle engines cost, and that under a steady load it settles."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from slimerl.conductor.elastic_policy import ElasticPolicy, StepLoad
from slimerl.spec.elastic import ElasticSpec

STEPS = 300


@dataclass(frozen=True)
class World:
    """A run, computed directly and not from shares. Seconds of a step: of the trainer's own work, of the samples on one
    engine, of one long answer that everything else has to wait for."""

    trains: float
    samples: float
    long_answer: float = 0.0
    overlaps: bool = True

    def shares(self, engines: int) -> tuple[float, float]:
        """(waited, idle)"""
        busy = self.samples / engines
        whole = (max(self.trains, busy) if self.overlaps else self.trains + busy) + self.long_answer
        return (whole - self.trains) / whole, 1 - busy / whole


@dataclass(frozen=True)
class Change:
    step: int
    engines: int
    why: str


def policy(overlaps: bool = True, steps: int = 10**6, **keys) -> ElasticPolicy:
    return ElasticPolicy(ElasticSpec(**{"max": 8, **keys}), overlaps, steps)


def played(
    one: ElasticPolicy,
    shares: Callable[[int, int], tuple[float, float]],
    engines: int = 1,
    steps: int = STEPS,
    lag: int = 2,
) -> list[Change]:
    """What becomes of a run that goes as `shares(step, engines)` says; an engine serves `lag` steps after its start."""
    serving, starts, changes = engines, 0, []
    for step in range(1, steps + 1):
        if step >= starts:
            serving = engines
        decision = one.look(StepLoad(step, *shares(step, serving), serving), engines)
        if decision.more:
            engines += decision.more
            changes.append(Change(step, engines, decision.why))
            serving, starts = min(serving, engines), step + 1 + (lag if decision.more > 0 else 0)
    return changes


def numbers(changes: list[Change]) -> list[int]:
    return [change.engines for change in changes]


def steady(world: World) -> Callable[[int, int], tuple[float, float]]:
    return lambda _, engines: world.shares(engines)


def test_a_trainer_that_waits_for_samples_gets_engines_one_by_one_until_it_waits_no_more():
    changes = played(policy(), steady(World(trains=1.0, samples=4.2)))
    assert numbers(changes) == [2, 3, 4]
    assert changes[0].why == "the trainer waited 76% of its time for samples, engines were idle for 0% of theirs"


def test_engines_that_have_nothing_to_do_go_as_long_as_the_trainer_need_not_wait_for_the_others():
    changes = played(policy(), steady(World(trains=1.0, samples=1.9)), engines=5)
    assert numbers(changes) == [4, 3, 2]
    assert changes[-1].why.endswith("engines were idle for 37% of theirs; with 2 it would wait 0%")


def test_synchronous_engines_idle_while_the_trainer_trains_and_are_kept_where_they_shorten_the_step():
    """With three the trainer waits for 27 % of a step, with four for 22 %."""
    changes = played(policy(overlaps=False), steady(World(trains=1.0, samples=1.1, overlaps=False)))
    assert numbers(changes) == [2, 3, 4]


def test_synchronous_engines_go_where_they_hardly_shorten_the_step():
    """One engine instead of four lengthens it from 1.01 to 1.05 s."""
    changes = played(policy(overlaps=False), steady(World(trains=1.0, samples=0.05, overlaps=False)), engines=4)
    assert numbers(changes) == [3, 2, 1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_waiting_for_one_long_answer_brings_no_engine_and_is_told(overlaps):
    shares = World(trains=1.0, samples=0.4, long_answer=2.0, overlaps=overlaps).shares(2)
    one = policy(overlaps)
    told = {one.look(StepLoad(step, *shares, 2), 2) for step in range(1, 20)}
    assert {decision.more for decision in told} == {0}
    assert any("more of them would not help" in decision.why for decision in told)


def test_engines_that_wait_for_a_long_answer_each_are_busy_and_none_helps_so_that_ever_fewer_are_tried():
    one = policy()
    changes = played(one, lambda _, engines: (0.6, 0.1))
    assert numbers(changes) == [2, 3, 4, 5]
    waits = [later.step - sooner.step for sooner, later in pairwise(changes)]
    assert [later - sooner for sooner, later in pairwise(waits)] == [20, 40]
    assert "not much less with the engine that was added last" in one.look(StepLoad(STEPS, 0.6, 0.1, 5), 5).why


def test_engines_that_are_busy_enough_stay():
    """A quarter of their time they are idle, and three would do."""
    assert played(policy(), steady(World(trains=1.0, samples=2.9)), engines=4) == []
    assert numbers(played(policy(engines_idle=0.2), steady(World(trains=1.0, samples=2.9)), engines=4)) == [3]


def test_engines_stay_while_the_trainer_waits_whatever_it_is_that_it_waits_for():
    """A sixth of the step, for a long answer; the engines are idle for more than nine tenths of it."""
    waiting = World(trains=1.0, samples=0.3, long_answer=0.2)
    assert played(policy(), steady(waiting), engines=3) == []
    assert numbers(played(policy(trainer_idle=0.5), steady(waiting), engines=3)) == [2, 1]


def test_beyond_the_most_engines_nothing_is_added_and_that_is_told():
    one, shares = policy(max=2), World(trains=1.0, samples=9.0).shares(2)
    told = [one.look(StepLoad(step, *shares, 2), 2) for step in range(1, 8)]
    assert [decision.more for decision in told] == [0] * 7
    assert told[-1].why == "the trainer waits for samples, and engine.elastic.max = 2 engines run"


def test_fewer_than_the_fewest_engines_never_run():
    assert numbers(played(policy(min=3), steady(World(trains=1.0, samples=0.1)), engines=5)) == [4, 3]


def test_an_engine_is_judged_by_whole_steps_in_which_it_served():
    """The second one takes 40 steps to serve, in all of which the trainer waits; the step in which it comes, and the
    four after it, are looked at before there is a third."""
    changes = played(policy(cooldown_steps=4), steady(World(trains=1.0, samples=9.0)), steps=60, lag=40)
    assert [change.step for change in changes] == [5, 5 + 1 + 40 + 4]


def test_an_engine_that_ended_and_returns_is_no_lack_of_engines():
    """Two serve well, one of them is lost for 30 steps, in which the trainer waits."""
    one, world = policy(), World(trains=1.0, samples=1.9)
    for step in range(1, STEPS):
        serving = 1 if 100 <= step < 130 else 2
        assert one.look(StepLoad(step, *world.shares(serving), serving), 2).more == 0


def test_a_step_that_goes_differently_changes_nothing():
    """Each ninth is an evaluation's: engines have other work, or a checkpoint holds the trainer up."""
    world = World(trains=1.0, samples=1.9)

    def shares(step: int, engines: int) -> tuple[float, float]:
        return [(0.9, 0.0), (0.0, 0.9)][step % 2] if step % 9 == 0 else world.shares(engines)

    assert played(policy(), shares, engines=2) == []


def test_what_could_not_be_done_is_asked_for_again_no_sooner_than_something_else():
    one, shares = policy(cooldown_steps=3), World(trains=1.0, samples=9.0).shares(1)
    asked = [step for step in range(1, 30) if one.look(StepLoad(step, *shares, 1), 1).more]
    assert asked == [4, 8, 12, 16, 20, 24, 28]


def test_nothing_changes_at_the_end_of_a_run():
    """What is added in the last five steps serves none of them."""
    for steps, added in ((10, 0), (11, 1)):
        assert len(played(policy(steps=steps), steady(World(trains=1.0, samples=9.0)), steps=steps)) == added


def test_engines_follow_a_load_that_grows_and_falls_again():
    quiet, busy = World(trains=1.0, samples=0.9), World(trains=1.0, samples=2.8)

    def shares(step: int, engines: int) -> tuple[float, float]:
        return (busy if 100 <= step < 200 else quiet).shares(engines)

    changes = played(policy(), shares, steps=500)
    assert numbers(changes) == [2, 3, 2, 1]
    assert 100 < changes[0].step < changes[1].step < 130
    assert 200 < changes[2].step < changes[3].step < 260


worlds = st.builds(
    World,
    trains=st.floats(0.1, 10),
    samples=st.floats(0.01, 40),
    long_answer=st.just(0.0) | st.floats(0, 10),
    overlaps=st.booleans(),
)
bounds = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
thresholds = st.fixed_dictionaries(
    {"trainer_idle": st.floats(0.2, 0.9), "engines_idle": st.floats(0.05, 0.9), "cooldown_steps": st.integers(1, 7)}
)


def within(changes: list[Change], few: int, many: int, cooldown: int) -> None:
    """What holds under any load."""
    assert all(few <= change.engines <= many for change in changes)
    steps = [change.step for change in changes]
    assert all(later - sooner > cooldown for sooner, later in pairwise(steps))


@settings(deadline=None)
@given(worlds, bounds, thresholds, st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**31))
def test_under_a_load_that_wavers_around_a_constant_engines_come_or_go_and_then_stay(
    world, bounds, keys, begin, lag, seed
):
    few, many = bounds
    begin, chance = few + begin % (many - few + 1), random.Random(seed)

    def shares(_: int, engines: int) -> tuple[float, float]:
        return tuple(min(1.0, max(0.0, share + chance.uniform(-0.01, 0.01))) for share in world.shares(engines))

    changes = played(policy(world.overlaps, min=few, max=many, **keys), shares, begin, lag=lag)
    within(changes, few, many, keys["cooldown_steps"])
    counts = [begin, *numbers(changes)]
    assert counts in (sorted(counts), sorted(counts, reverse=True)), "some came and went"


starved = st.tuples(st.floats(0.3, 0.95), st.floats(0, 0.1))
bored = st.tuples(st.floats(0, 0.05), st.floats(0.5, 0.95))
anything = st.tuples(st.floats(0, 1), st.floats(0, 1))


@settings(deadline=None)
@given(st.lists(starved | bored | anything, min_size=4, max_size=4), st.booleans(), st.integers(0, 3))
@example([(0.5, 0.0), (0.0, 0.6), (0.0, 0.6), (0.0, 0.6)], True, 0)
def test_engines_that_do_not_do_as_is_foreseen_are_tried_ever_less_often(of_each_number, overlaps, lag):
    """Each number of engines goes as it pleases, and always so: one waits, two idle, …"""
    cooldown, steps = 2, 600
    one = policy(overlaps, max=4, cooldown_steps=cooldown)
    changes = played(one, lambda _, engines: of_each_number[engines - 1], steps=steps, lag=lag)
    within(changes, 1, 4, cooldown)
    tries = math.log2(steps / cooldown) + 1
    assert len(changes) <= 3 * (2 * tries + 1)


@settings(deadline=None)
@given(st.lists(anything, min_size=50, max_size=50), bounds, st.booleans(), st.integers(1, 5))
def test_under_any_load_the_bounds_and_the_cooldown_hold(loads, bounds, overlaps, cooldown):
    few, many = bounds
    one = policy(overlaps, min=few, max=many, cooldown_steps=cooldown, trainer_idle=0.4, engines_idle=0.2)
    within(played(one, lambda step, _: loads[step // 7], few, steps=STEPS, lag=1), few, many, cooldown)
