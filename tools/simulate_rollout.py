"""Compare rollout policies on simulated engines: makespan of one batch, and throughput of training steps.

    python tools/simulate_rollout.py                     # the goals of scheduling, in one run
    python tools/simulate_rollout.py r3                  # goal R3 alone
    python tools/simulate_rollout.py makespan            # one batch, by each policy; mean ± spread over seeds
    python tools/simulate_rollout.py training            # steps of training on 32k-token answers, by staleness
    python tools/simulate_rollout.py colocated           # ... on GPUs that engines and trainer share: over-sampling
    python tools/simulate_rollout.py failures            # ... while an engine dies every 1000 s for 300 s
    python tools/simulate_rollout.py makespan --picture occupancy.svg

Router, order of requests, foretelling of lengths, staleness gate and choice of batches are the real ones; engines are
simulated (slimerl/simulation/rollout_engine.py says how, and with which rates). Every figure stands beside what no
policy can exceed (slimerl/simulation/rollout_bounds.py). Ends with 1 where a goal was missed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TypeVar

from bench_goals import Goal, judged
from rich.console import Console
from rich.progress import Progress

from slimerl.simulation.rollout_compare import (
    COLOCATED_PLANS,
    DIVIDED,
    MAKESPAN_PLANS,
    SYNCHRONOUS,
    TRAINING_PLANS,
    Makespan,
    Plan,
    Throughput,
    makespan,
    throughput,
)
from slimerl.simulation.rollout_drawing import busy_share, occupancy_svg, occupancy_text
from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_scenarios import DENSE, LARGE_EXPERTS, LONG_ANSWERS, SATURATED, TAIL
from slimerl.simulation.rollout_trace import Shape, draw_trace
from slimerl.simulation.rollout_training import Failures, Regime

RATES = {"dense": DENSE, "saturated": SATURATED, "large-experts": LARGE_EXPERTS}
FAILURES = Failures(every_s=1000.0, down_s=300.0)
GOAL_SPEEDUP, GOAL_MAKESPAN, GOAL_HIT, GOAL_PARTIAL = 2.0, 1.40, 0.97, 1.15
Result = TypeVar("Result", Makespan, Throughput)


def main() -> int:
    return judged(run(read_options()))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Default: of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("goals", "r3", "makespan", "training", "colocated", "failures")
    parser.add_argument("what", nargs="?", choices=kinds, default="goals")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--engines", type=int, help="default: 8 for a makespan, 4 for training")
    parser.add_argument("--rates", choices=RATES, help="default: saturated for a makespan, large-experts for training")
    parser.add_argument("--slots", type=int, help="decode slots per engine")
    parser.add_argument("--spread", type=float, help="of the answers' lengths: standard deviation of the logarithm")
    parser.add_argument("--groups", type=int, default=128, help="training: groups of 8 per step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--train-s", type=float, default=350.0, help="seconds of a training step")
    parser.add_argument("--only", help="policies whose name contains this")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes; default: one per core")
    parser.add_argument("--picture", type=Path, help="write the engines' occupancy under the last policy as SVG")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[Goal]:
    """Print what was asked for; the goals that it has."""
    regime = Regime(options.groups, 0, options.steps, options.train_s)
    what, goals = options.what, options.what == "goals"
    found: list[Goal] = []
    plans: Sequence[Plan]
    if what in ("goals", "r3", "makespan"):
        plans = MAKESPAN_PLANS if what == "makespan" else (MAKESPAN_PLANS[0], *MAKESPAN_PLANS[-3:])
        found += compare_makespans(options, plans)
    if what in ("goals", "training"):
        found += compare_training(options, regime, (SYNCHRONOUS, DIVIDED) if goals else TRAINING_PLANS)
    if what in ("goals", "r3", "training"):
        found += partial_alone(options, replace(regime, train_s=0.0))
    if what in ("goals", "colocated"):
        plans = COLOCATED_PLANS[:2] if goals else COLOCATED_PLANS
        found += compare_training(options, replace(regime, colocated=True), plans)
    if what in ("goals", "failures"):
        stale = tuple(plan for plan in TRAINING_PLANS if plan.max_staleness == 1)
        plans = (SYNCHRONOUS, DIVIDED) if goals else (SYNCHRONOUS, *stale)
        found += compare_training(options, replace(regime, failures=FAILURES), plans)
    return found


def compare_makespans(options: argparse.Namespace, plans: Sequence[Plan]) -> list[Goal]:
    goals = []
    rates = _rates(options, "saturated")
    engines = options.engines or 8
    shape = _spread_out(TAIL, options)
    print(f"{shape.groups} groups x {shape.siblings} x {shape.turns} turns on {engines} engines of {rates.slots} slots")
    print(f"{'policy':<40}{'makespan / bound':>20}{'hit / oracle':>16}{'max/mean requests':>19}{'moves':>7}")
    run = partial(_makespan, shape, rates, engines)
    for plan, runs in _results(options, "makespan", run, _chosen(plans, options.only)):
        over, hits = [one.over_bound for one in runs], [one.hit_over_oracle for one in runs]
        if plan in MAKESPAN_PLANS[-3:]:
            goals.append(Goal(f"R3 {plan.name}: makespan / bound", mean(over), GOAL_MAKESPAN))
            goals.append(Goal(f"R3 {plan.name}: least hit rate / oracle", min(hits), GOAL_HIT, at_least=True))
        moves = mean(one.tally.moves for one in runs)
        print(
            f"{plan.name:<40}{_spread(over):>20}{_spread(hits):>16}"
            f"{_spread([one.tally.spread for one in runs]):>19}{moves:>7.0f}",
            flush=True,
        )
        _draw(options, plan, runs[-1], rates)
    print()
    return goals


def compare_training(options: argparse.Namespace, regime: Regime, plans: Sequence[Plan]) -> list[Goal]:
    goals = []
    rates = _rates(options, "large-experts")
    engines = options.engines or 4
    shape = _spread_out(LONG_ANSWERS, options)
    print(_described(options, regime, shape, rates, engines))
    print(f"{'policy':<58}{'tokens/s':>10}{'speed-up':>15}{'time / bound':>16}{'staleness':>11}")
    base: list[Throughput] = []
    run = partial(_throughput, shape, rates, engines, regime)
    for plan, runs in _results(options, "training", run, _chosen(plans, options.only)):
        base = base or runs
        speedups = [one.tokens_per_s / first.tokens_per_s for one, first in zip(runs, base, strict=True)]
        if plan is DIVIDED and regime.failures is None:
            goals.append(Goal(f"{plan.name}: over {SYNCHRONOUS.name}", mean(speedups), GOAL_SPEEDUP, at_least=True))
        print(
            f"{plan.name:<58}{mean(one.tokens_per_s for one in runs):>10.0f}{_spread(speedups):>15}"
            f"{_spread([one.over_bound for one in runs]):>16}"
            f"{max(step.staleness for one in runs for step in one.steps):>11}",
            flush=True,
        )
        _draw(options, plan, runs[-1], rates)
    limits = [one.bound_tokens_per_s / one.tokens_per_s for one in base]
    print(f"{'throughput bound':<58}{mean(one.bound_tokens_per_s for one in base):>10.0f}{_spread(limits):>15}")
    print()
    return goals


def partial_alone(options: argparse.Namespace, regime: Regime) -> list[Goal]:
    """Rollouts whose training takes no time: what partial rollouts themselves lose."""
    rates, shape = _rates(options, "large-experts"), _spread_out(LONG_ANSWERS, options)
    run = partial(_throughput, shape, rates, options.engines or 4, regime)
    ((plan, runs),) = _results(options, "partial rollouts", run, [DIVIDED])
    over = [one.over_bound for one in runs]
    print(f"{plan.name}, training in no time: {_spread(over)} x bound\n")
    return [Goal("R3 partial rollouts, training in no time: time / bound", mean(over), GOAL_PARTIAL)]


def _makespan(shape: Shape, rates: EngineRates, engines: int, plan: Plan, seed: int) -> Makespan:
    return makespan(plan, draw_trace(shape, seed), rates, engines)


def _throughput(shape: Shape, rates: EngineRates, engines: int, regime: Regime, plan: Plan, seed: int) -> Throughput:
    return throughput(plan, shape, seed, rates, engines, regime)


def _results(
    options: argparse.Namespace, what: str, run: Callable[[Plan, int], Result], plans: Sequence[Plan]
) -> list[tuple[Plan, list[Result]]]:
    """Each plan with every seed, over processes, behind a progress bar."""
    with (
        ProcessPoolExecutor(min(options.jobs, len(plans) * options.seeds)) as pool,
        Progress(console=Console(file=sys.stderr), transient=True) as progress,
    ):
        task = progress.add_task(what, total=len(plans) * options.seeds)
        futures = [[pool.submit(run, plan, seed) for seed in range(options.seeds)] for plan in plans]
        for future in (each for of_plan in futures for each in of_plan):
            future.add_done_callback(lambda _: progress.advance(task))
        return [(plan, [each.result() for each in of_plan]) for plan, of_plan in zip(plans, futures, strict=True)]


def _described(options: argparse.Namespace, regime: Regime, shape: Shape, rates: EngineRates, engines: int) -> str:
    where = "meanwhile the engines stand still, on the same GPUs" if regime.colocated else "meanwhile the engines go on"
    dying = regime.failures
    return (
        f"{options.groups} groups x {shape.siblings} per step on {engines} engines of {rates.slots} slots, answers of "
        f"{shape.answer.mean:.0f} tokens on average, at most {shape.answer.most}; a training step takes "
        f"{regime.train_s:.0f} s, {where}; an update {regime.update_s:.0f} s"
        + (f"; an engine dies every {dying.every_s:.0f} s and is back after {dying.down_s:.0f} s" if dying else "")
    )


def _rates(options: argparse.Namespace, default: str) -> EngineRates:
    rates = RATES[options.rates or default]
    return rates if options.slots is None else replace(rates, slots=options.slots)


def _spread_out(shape: Shape, options: argparse.Namespace) -> Shape:
    return shape if options.spread is None else replace(shape, answer=replace(shape.answer, spread=options.spread))


def _chosen(plans: Sequence[Plan], only: str | None) -> list[Plan]:
    """The first plan is what the others are compared with, and always runs."""
    return [plan for number, plan in enumerate(plans) if number == 0 or only is None or only in plan.name]


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0.0:.3f}"


def _draw(options: argparse.Namespace, plan: Plan, run: Makespan | Throughput, rates: EngineRates) -> None:
    if options.picture is None:
        return
    until = max(changes[-1][0] for changes in run.tally.occupancy.values())
    print("\n".join(occupancy_text(run.tally.occupancy, rates.slots, until)))
    print(f"{busy_share(run.tally.occupancy, rates.slots, until):.0%} of the decode slots in use")
    options.picture.write_text(occupancy_svg(plan.name, run.tally.occupancy, rates.slots, until))


if __name__ == "__main__":
    sys.exit(main())
