"""The goals of routing and of the makespan, on simulated engines."""

from dataclasses import replace
from statistics import mean

import pytest

from slimerl.simulation.rollout_compare import Plan, kv_aware, longest_first, makespan, whole_groups
from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_scenarios import CONCURRENCIES, DENSE, DESIGN, ROUTING_SHAPES, SATURATED, TAIL
from slimerl.simulation.rollout_trace import Shape, draw_trace

ENGINES = 8


def at_concurrency(concurrency: int, rates: EngineRates) -> Plan:
    return Plan("KV-aware", kv_aware, in_flight=concurrency / ENGINES / rates.slots)


def test_the_design_trace_is_as_cacheable_as_the_measured_one() -> None:
    hit = mean(draw_trace(DESIGN, seed).oracle().hit_rate for seed in range(3))
    assert hit == pytest.approx(0.8357, abs=0.004)
    assert draw_trace(DESIGN, 0).requests == 1536


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
@pytest.mark.parametrize("shape", ROUTING_SHAPES, ids=lambda shape: shape.name)
def test_goal_r2_hits_near_the_oracle_and_requests_spread_evenly(shape: Shape, concurrency: int) -> None:
    if shape.turns > 4:
        shape = replace(shape, turns=6)
    result = makespan(at_concurrency(concurrency, DENSE), draw_trace(shape, 0), DENSE, ENGINES)
    assert result.hit_over_oracle >= 0.99
    assert result.tally.spread <= 1.10


def test_goal_r2_a_saturated_fleet_is_not_served_by_one_engine() -> None:
    """The measured fault: at concurrency 32 one engine was sent 1,120 of 1,536 requests and another none."""
    rates = EngineRates(slots=2)
    result = makespan(at_concurrency(32, rates), draw_trace(DESIGN, 0), rates, ENGINES)
    assert result.hit_over_oracle >= 0.95
    assert result.tally.spread <= 1.25


@pytest.mark.parametrize("history", [True, False])
def test_goal_r3_makespan_near_the_bound_at_nearly_all_hits(history: bool) -> None:
    plan = Plan("x", kv_aware, longest_first, history=history)
    results = [makespan(plan, draw_trace(TAIL, seed), SATURATED, ENGINES) for seed in range(4)]
    assert mean(result.over_bound for result in results) <= 1.40
    assert min(result.hit_over_oracle for result in results) >= 0.97


def test_whole_group_affinity_loses_to_two_engines_per_group() -> None:
    rates = EngineRates(slots=4)
    ratios = []
    for seed in range(3):
        trace = draw_trace(TAIL, seed)
        whole = makespan(Plan("x", whole_groups, in_flight=1.0), trace, rates, ENGINES)
        aware = makespan(Plan("x", kv_aware, in_flight=1.0), trace, rates, ENGINES)
        ratios.append(whole.seconds / aware.seconds)
    assert mean(ratios) > 1.2
