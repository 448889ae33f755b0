"""Simulated rollouts lose nothing, never beat their bounds, and repeat exactly."""

from dataclasses import replace
from itertools import groupby
from statistics import mean

import pytest

from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.lengths import ResponseLengths
from slimerl.rollout.order import LengthOrder, Progress
from slimerl.rollout.router import LeastLoaded
from slimerl.simulation.rollout_bounds import answer_tokens, bound
from slimerl.simulation.rollout_compare import (
    MAKESPAN_PLANS,
    TRAINING_PLANS,
    Plan,
    kv_aware,
    least_loaded,
    longest_first,
    makespan,
    throughput,
    whole_groups,
)
from slimerl.simulation.rollout_drawing import busy_share, occupancy_svg, occupancy_text
from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_order import FirstCome
from slimerl.simulation.rollout_run import Policy, RolloutSimulation
from slimerl.simulation.rollout_trace import Lengths, Shape, draw_trace
from slimerl.simulation.rollout_training import Failures, Regime, TrainingSimulation

RATES = EngineRates(slots=8, kv_tokens=40_000)
SMALL = Shape("small", groups=12, siblings=4, turns=3, prompt=Lengths(400, 0.3), answer=Lengths(100, 0.8, 2000))


def simulate(router: KvRouter | LeastLoaded, engines: int = 3, chunk: int | None = None, tail: bool = False):  # type: ignore[no-untyped-def]
    trace = draw_trace(SMALL, 0)
    simulation = RolloutSimulation(engines, RATES, router, Policy(40, chunk_tokens=chunk, tail_moves=tail))
    simulation.feed(trace.conversations)
    return trace, simulation


def assert_all_done(trace, simulation) -> None:  # type: ignore[no-untyped-def]
    assert set(simulation.tally.finished_at) == {one.session for one in trace.conversations}
    assert simulation.tally.generated_tokens == trace.answer_tokens
    assert simulation.router.running() == []
    assert all(engine.load == 0 for engine in simulation.engines.values())


@pytest.mark.parametrize("plan", MAKESPAN_PLANS, ids=lambda plan: plan.name)
def test_every_policy_finishes_everything_and_none_beats_the_bound(plan: Plan) -> None:
    trace = draw_trace(SMALL, 1)
    result = makespan(plan, trace, RATES, engines=3)
    assert len(result.tally.finished_at) == len(trace.conversations)
    assert result.tally.generated_tokens == trace.answer_tokens
    assert result.over_bound >= 1.0
    assert result.hit_over_oracle <= 1.0 + 1e-9


def test_the_same_seed_gives_the_same_run() -> None:
    plan = MAKESPAN_PLANS[-1]
    runs = [makespan(plan, draw_trace(SMALL, 3), RATES, engines=3) for _ in range(2)]
    assert runs[0].seconds == runs[1].seconds
    assert runs[0].tally.requests == runs[1].tally.requests


def test_divided_answers_come_out_whole() -> None:
    trace, simulation = simulate(KvRouter(1000), chunk=37)
    simulation.run()
    assert_all_done(trace, simulation)
    assert sum(simulation.tally.requests.values()) > trace.requests


def test_tail_moves_lose_no_token() -> None:
    trace, simulation = simulate(KvRouter(1000), engines=6, tail=True)
    simulation.run()
    assert_all_done(trace, simulation)


def test_the_requests_of_an_engine_that_dies_are_finished_elsewhere() -> None:
    for router in (KvRouter(1000), LeastLoaded(1000)):
        trace, simulation = simulate(router)
        simulation.at(2.0, lambda simulation=simulation: simulation.kill("engine-1"))  # type: ignore[misc]
        simulation.run()
        assert_all_done(trace, simulation)
        assert max(time for time, *_ in simulation.tally.occupancy["engine-1"]) == 2.0


def test_an_engine_that_comes_back_takes_its_part_again() -> None:
    trace, simulation = simulate(KvRouter(1000))
    before = {}

    def back() -> None:
        before.update(simulation.tally.requests)
        simulation.add_engine("engine-1")
        simulation.router.release(0, ["engine-1"], {})

    simulation.at(1.0, lambda: simulation.kill("engine-1"))
    simulation.at(2.0, back)
    simulation.run()
    assert_all_done(trace, simulation)
    assert simulation.tally.requests["engine-1"] > before["engine-1"]


def test_an_update_in_mid_generation_loses_no_token_and_voids_what_was_cached() -> None:
    quiet, undisturbed = simulate(KvRouter(1000))
    undisturbed.run()
    trace, simulation = simulate(KvRouter(1000))
    for version in range(1, 21):
        simulation.at(0.4 * version, lambda version=version: simulation.update(version, 0.1))  # type: ignore[misc]
    simulation.run()
    assert_all_done(trace, simulation)
    assert simulation.router.version == 20
    assert simulation.tally.prefilled_tokens > undisturbed.tally.prefilled_tokens
    assert quiet == trace


def test_a_hold_waits_for_what_is_under_way_and_sends_nothing_more() -> None:
    trace, simulation = simulate(KvRouter(1000))
    held: list[float] = []

    def ready() -> None:
        held.append(simulation.now)
        assert simulation.router.running() == []
        simulation.update(1, 1.0)

    simulation.at(1.0, lambda: simulation.hold(ready))
    simulation.run()
    assert held
    assert_all_done(trace, simulation)


def test_first_come_is_first_served_but_for_what_goes_on() -> None:
    order: FirstCome[str] = FirstCome()
    order.add("a", "g", Progress("g", 0, 10))
    order.add("b", "g", Progress("g", 0, 10))
    order.add("b goes on", "g", Progress("g", 5, 5))
    taken = []
    while (entry := order.take()) is not None:
        taken.append(entry.item)
    assert taken == ["b goes on", "a", "b"]
    assert len(order) == 0


def test_the_real_order_probes_every_group_of_the_trace_first() -> None:
    trace = draw_trace(SMALL, 0)
    lengths = ResponseLengths()
    policy = Policy(SMALL.groups, LengthOrder(lengths), lengths=lengths)
    simulation = RolloutSimulation(3, RATES, KvRouter(1000), policy)
    simulation.feed(trace.conversations)
    assert len({session.partition(".")[0] for session in simulation._under_way}) == SMALL.groups
    simulation.run()
    assert_all_done(trace, simulation)


def test_the_oracle_needs_each_text_once() -> None:
    trace = draw_trace(replace(SMALL, system=100, groups=2, siblings=2, turns=1, prompt=Lengths(50)), 0)
    oracle = trace.oracle()
    assert oracle.prompt_tokens == 4 * 150
    assert oracle.missing_tokens == 100 + 2 * 50


def training(max_staleness: int, steps: int = 4) -> TrainingSimulation:
    trace = draw_trace(replace(SMALL, groups=4 * (steps + max_staleness + 1)), 0)
    groups = iter([tuple(group) for _, group in groupby(trace.conversations, key=lambda one: one.group)])
    rollout = RolloutSimulation(2, RATES, KvRouter(1000), Policy(20))
    return TrainingSimulation(rollout, Regime(4, max_staleness, steps, train_s=1.0), groups)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_steps_take_whole_groups_that_are_not_too_stale(max_staleness: int) -> None:
    simulation = training(max_staleness)
    steps = simulation.run()
    taken = [name for step in steps for name in step.groups]
    assert len(taken) == len(set(taken)) == 16
    assert max(step.staleness for step in steps) <= max_staleness
    for step in steps:
        for name in step.groups:
            for one in simulation.by_group[name]:
                assert simulation.rollout.tally.finished_at[one.session] < step.released_at


@pytest.mark.parametrize("oversample", [1.5, 2.0])
def test_over_sampling_fills_engines_that_share_the_trainers_gpus(oversample: float) -> None:
    """The engines stand still while it trains, so that nothing but the batch's own tail is there to be filled."""
    regime = Regime(4, 0, 6, train_s=1.0, update_s=0.5, colocated=True)
    shape = replace(SMALL, turns=1, answer=Lengths(300, 1.2, 6000))
    over = Plan("x", kv_aware, longest_first, chunk_tokens=256, max_staleness=1, oversample=oversample)
    speeds = {}
    for plan in (Plan("x", kv_aware, longest_first), over):
        runs = [throughput(plan, shape, seed, RATES, 2, regime) for seed in range(4)]
        assert all(run.over_bound >= 1.0 for run in runs)
        assert max(step.staleness for run in runs for step in run.steps) == plan.max_staleness
        speeds[plan] = mean(run.tokens_per_s for run in runs)
    assert speeds[over] > 1.2 * min(speeds.values())


def test_engines_that_die_again_and_again_cost_time_and_no_sample() -> None:
    """Injected: an engine dies every two seconds, and is back a second later."""
    plan = Plan("x", kv_aware, longest_first, chunk_tokens=64, max_staleness=1)
    calm = Regime(4, 0, 6, train_s=1.0)
    quiet, stormy = (
        throughput(plan, SMALL, 0, RATES, 3, regime) for regime in (calm, replace(calm, failures=Failures(2.0, 1.0)))
    )
    assert stormy.tokens_per_s < quiet.tokens_per_s
    for run in (quiet, stormy):
        taken = [name for step in run.steps for name in step.groups]
        assert len(taken) == len(set(taken)) == 24
    deaths = [changes for changes in stormy.tally.occupancy.values() if len({time for time, *_ in changes}) > 1]
    assert len(deaths) == 3, "every engine worked before and after"


def test_staleness_overlaps_training_with_generation() -> None:
    plans = {plan.max_staleness: plan for plan in TRAINING_PLANS if plan.router is kv_aware}
    regime = Regime(4, 0, 6, train_s=3.0)
    results = {eta: throughput(plan, SMALL, 0, RATES, 2, regime) for eta, plan in plans.items()}
    assert results[0].tokens_per_s < results[1].tokens_per_s < results[2].tokens_per_s * 1.05
    assert all(result.over_bound >= 1.0 for result in results.values())


def test_the_bound_is_met_by_a_full_engine() -> None:
    """Equal conversations that fill every slot: what the bound leaves out is the prefills' own steps."""
    shape = Shape("full", groups=4, siblings=2, turns=1, prompt=Lengths(10), answer=Lengths(1000))
    trace = draw_trace(shape, 0)
    result = makespan(Plan("x", least_loaded), trace, replace(RATES, slots=8), engines=1)
    assert result.seconds / result.bound.work_s < 1.01
    assert bound(trace.conversations, RATES, 1).work_s == pytest.approx(result.bound.work_s)
    assert answer_tokens(trace.conversations) == 8000


def test_occupancy_is_drawn() -> None:
    result = makespan(Plan("x", whole_groups), draw_trace(SMALL, 0), RATES, engines=3)
    rows = occupancy_text(result.tally.occupancy, RATES.slots, result.seconds, columns=40)
    assert len(rows) == 4
    assert "@" in rows[0] + rows[1] + rows[2]
    picture = occupancy_svg("a < b", result.tally.occupancy, RATES.slots, result.seconds)
    assert picture.count("<polygon") == 3
    assert "a &lt; b" in picture
    assert 0.2 < busy_share(result.tally.occupancy, RATES.slots, result.seconds) <= 1.0
