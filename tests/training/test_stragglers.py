"""The rank that the others wait for is named: in the figures, and in the log."""

import time
from pathlib import Path

import tiny
from machine_steps import Variant, prepare
from test_loop import RecordingLog

from slimerl.spec.schema import ParallelSpec
from slimerl.training.alarms import Alarms
from slimerl.training.stragglers import LEAST_STEPS, RankTimes, straggler_figures

SLOW_S = 0.3


def times_of_slow_rank(model_path: Path, slow: int) -> list[dict[str, float]]:
    """Figures of each step where every forward pass of one rank takes `SLOW_S` longer."""
    machine = prepare(model_path, ParallelSpec(data=2), Variant())
    grid = machine.built.grid
    if grid.rank == slow:
        machine.built.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
    times, found = RankTimes(("compute",), grid.device), []
    for step in range(LEAST_STEPS):
        machine.trainer.step(machine.packs(step))
        found.append(times.compare({"compute": machine.trainer.compute_s}))
    return found


def test_a_slow_rank_is_named_although_all_ranks_take_equally_long(ranks, tmp_path):
    """Injected: a rank that sleeps in its forward passes. The step takes both ranks as long, for they exchange
    gradients at its end."""
    tiny.write_model(tmp_path, "qwen3")
    of_ranks = ranks.run(2, times_of_slow_rank, tmp_path, 1)
    assert of_ranks[0] == of_ranks[1], "the figures are the same on every rank"
    *early, last = of_ranks[0]
    assert early == [{}] * (LEAST_STEPS - 1)
    assert last["straggler/rank_1_compute"] == last["straggler/compute"] > 1.5
    assert "straggler/rank_0_compute" not in last

    events = []
    figures = Alarms("fp32", RecordingLog(events)).check(LEAST_STEPS, last)
    assert figures["alarm/straggler"] == last["straggler/compute"]
    assert events == [("alarm", "straggler")]


def test_ranks_that_differ_by_less_are_not_named():
    assert straggler_figures("compute", [1.0, 1.1, 1.4, 0.9]) == {"straggler/compute": 1.4}


def test_of_two_ranks_the_one_is_slow_that_takes_half_as_long_again_as_the_other():
    assert straggler_figures("compute", [1.0, 1.6]) == {"straggler/compute": 1.6, "straggler/rank_1_compute": 1.6}


def test_what_takes_no_time_worth_a_message_is_not_compared():
    assert straggler_figures("fetch", [0.001, 0.005]) == {}
    assert straggler_figures("compute", [3.0]) == {}
