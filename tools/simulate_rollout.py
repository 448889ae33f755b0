"""Compare rollout policies on simulated engines: makespan of one batch, and throughput of training steps.

    python tools/simulate_rollout.py makespan            # one batch, by each policy; mean ± spread over seeds
    python tools/simulate_rollout.py training            # steps of training on 32k-token answers, by staleness
    python tools/simulate_rollout.py makespan --picture occupancy.svg

The routers are the real ones, and so are the staleness gate and the choice of batches; engines are simulated
(slimerl/simulation/rollout_engine.py says how, and with which rates). Every figure stands beside what no policy can
exceed (slimerl/simulation/rollout_bounds.py).
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from slimerl.simulation.rollout_compare import (
    MAKESPAN_PLANS,
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
from slimerl.simulation.rollout_trace import draw_trace
from slimerl.simulation.rollout_training import Regime

RATES = {"dense": DENSE, "saturated": SATURATED, "large-experts": LARGE_EXPERTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("makespan", "training"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--engines", type=int, help="default: 8 for a makespan, 4 for training")
    parser.add_argument("--rates", choices=RATES, help="default: saturated for a makespan, large-experts for training")
    parser.add_argument("--slots", type=int, help="decode slots per engine")
    parser.add_argument("--spread", type=float, help="of the answers' lengths: standard deviation of the logarithm")
    parser.add_argument("--groups", type=int, default=128, help="training: groups of 8 per step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--train-s", type=float, default=350.0, help="seconds of a training step")
    parser.add_argument("--only", help="policies whose name contains this")
    parser.add_argument("--picture", type=Path, help="write the engines' occupancy under the last policy as SVG")
    options = parser.parse_args()
    if options.what == "makespan":
        compare_makespans(options)
    else:
        compare_training(options)


def compare_makespans(options: argparse.Namespace) -> None:
    rates = _rates(options, "saturated")
    engines = options.engines or 8
    shape = TAIL if options.spread is None else replace(TAIL, answer=replace(TAIL.answer, spread=options.spread))
    print(f"{shape.groups} groups x {shape.siblings} x {shape.turns} turns on {engines} engines of {rates.slots} slots")
    print(f"{'policy':<40}{'makespan / bound':>20}{'hit / oracle':>16}{'max/mean requests':>19}{'moves':>7}")
    for plan in _chosen(MAKESPAN_PLANS, options.only):
        runs = [makespan(plan, draw_trace(shape, seed), rates, engines) for seed in range(options.seeds)]
        print(
            f"{plan.name:<40}{_spread([run.over_bound for run in runs]):>20}"
            f"{_spread([run.hit_over_oracle for run in runs]):>16}"
            f"{_spread([run.tally.spread for run in runs]):>19}{mean(run.tally.moves for run in runs):>7.0f}",
            flush=True,
        )
        _draw(options, plan, runs[-1], rates)


def compare_training(options: argparse.Namespace) -> None:
    rates = _rates(options, "large-experts")
    engines = options.engines or 4
    answer = LONG_ANSWERS.answer
    shape = (
        LONG_ANSWERS if options.spread is None else replace(LONG_ANSWERS, answer=replace(answer, spread=options.spread))
    )
    regime = Regime(options.groups, 0, options.steps, options.train_s)
    print(
        f"{options.groups} groups x {shape.siblings} per step on {engines} engines of {rates.slots} slots, answers of "
        f"{shape.answer.mean:.0f} tokens on average, at most {shape.answer.most}; a training step takes "
        f"{regime.train_s:.0f} s, an update {regime.update_s:.0f} s"
    )
    print(f"{'policy':<58}{'tokens/s':>10}{'speed-up':>15}{'time / bound':>16}{'staleness':>11}")
    base: list[Throughput] = []
    for plan in _chosen(TRAINING_PLANS, options.only):
        runs = [throughput(plan, shape, seed, rates, engines, regime) for seed in range(options.seeds)]
        base = base or runs
        speedups = [run.tokens_per_s / first.tokens_per_s for run, first in zip(runs, base, strict=True)]
        print(
            f"{plan.name:<58}{mean(run.tokens_per_s for run in runs):>10.0f}{_spread(speedups):>15}"
            f"{_spread([run.over_bound for run in runs]):>16}"
            f"{max(step.staleness for run in runs for step in run.steps):>11}",
            flush=True,
        )
        _draw(options, plan, runs[-1], rates)
    limits = [run.bound_tokens_per_s / first.tokens_per_s for run, first in zip(runs, base, strict=True)]
    print(f"{'throughput bound':<58}{mean(run.bound_tokens_per_s for run in runs):>10.0f}{_spread(limits):>15}")


def _rates(options: argparse.Namespace, default: str) -> EngineRates:
    rates = RATES[options.rates or default]
    return rates if options.slots is None else replace(rates, slots=options.slots)


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
    main()
