"""What the tools that compare runs make of their records, and what they do not run again."""

import asyncio
from pathlib import Path
from statistics import fmean

import pytest
from algorithm_learning import CASES, FROM_DATA, options_of, refused
from compare_modes import compare, seconds_to, tail_override, tokens_behind, unequal_ratio
from slow_rewards import CAP, delay_s, serve
from tiny_run import write_spec
from variants import is_done

from slimerl.algorithms import ALGORITHMS
from slimerl.engine.local_resources import ReservedPort
from slimerl.rewards.build import build_reward
from slimerl.rewards.outcome import RewardRequest, Scored, Unparsable
from slimerl.spec import load_spec
from slimerl.spec.load import dump_spec
from slimerl.telemetry.run_log import RunLog


def test_the_seconds_to_an_accuracy_are_linear_between_evaluations():
    points = [(0, 0.0, 0.2), (5, 10.0, 0.4), (10, 30.0, 0.8)]
    assert seconds_to(points, 0.2) == 0.0
    assert seconds_to(points, 0.3) == pytest.approx(5.0)
    assert seconds_to(points, 0.6) == pytest.approx(20.0)
    assert seconds_to(points, 0.9) is None


def test_modes_are_compared_at_the_best_accuracy_that_all_reached():
    slow = {"accuracy": [(0, 0.0, 0.2), (5, 100.0, 0.6)]}
    fast = {"accuracy": [(0, 0.0, 0.2), (5, 10.0, 0.7), (10, 20.0, 0.65)]}
    compared = compare({"slow": slow, "fast": fast}, accuracy=None)
    assert compared["slow"]["wanted_accuracy"] == compared["fast"]["wanted_accuracy"] == 0.6
    assert compared["slow"]["seconds_to_accuracy"] == pytest.approx(100.0)
    assert compared["fast"]["seconds_to_accuracy"] == pytest.approx(8.0)


def test_the_histogram_of_staleness_weighs_each_step_by_its_tokens():
    steps = [
        {"rollout/generated_tokens": 300.0, "staleness/tokens_behind_0": 1.0},
        {"rollout/generated_tokens": 100.0, "staleness/tokens_behind_0": 0.2, "staleness/tokens_behind_2": 0.8},
    ]
    assert tokens_behind(steps) == {"0": pytest.approx(0.8), "2": pytest.approx(0.2)}


def test_a_first_ratio_that_is_not_one_is_a_problem_of_the_synchronous_run_alone():
    assert unequal_ratio({"staleness-0": {"first_ratio": 1.0005}}, within=1e-3) == []
    assert unequal_ratio({"staleness-4": {"first_ratio": 1.2}}, within=1e-3) == []
    assert "1.200000" in unequal_ratio({"staleness-0": {"first_ratio": 1.2}}, within=1e-3)[0]


def test_the_tail_is_heavy_has_the_mean_that_was_asked_for_and_is_the_same_in_every_mode():
    delays = sorted(delay_s(f"p{n}/0", mean_s=1.0, shape=1.5) for n in range(20_000))
    assert delays[0] >= 1 / 3, "Pareto's least value for that mean"
    assert fmean(delays) == pytest.approx(0.9, abs=0.1), "the cap takes the rest"
    assert delays[len(delays) // 2] < 0.6
    assert delays[-1] == CAP
    assert delay_s("p7/3", 1.0, 1.5) == delay_s("p7/3", 1.0, 1.5)


def test_the_slow_service_judges_as_the_exact_rule_does_in_the_words_of_the_http_reward(tmp_path):
    async def judged(url, *responses):
        section = load_spec(write_spec(tmp_path), [tail_override(url)]).reward
        reward = build_reward(section)
        await reward.start()
        try:
            return [await reward.score(RewardRequest("p0/0", response, "146")) for response in responses]
        finally:
            await reward.close()

    port = ReservedPort("127.0.0.1")
    number = port.number
    port.release()
    with serve(0.001, 1.5, number) as url:
        assert asyncio.run(judged(url, "146", "136", " ")) == [Scored(1.0, True), Scored(0.0, False), Unparsable()]


def test_a_run_is_done_only_where_it_came_to_its_end_with_the_same_spec(tmp_path):
    spec = dump_spec(load_spec(write_spec(tmp_path)))
    run_dir = tmp_path / "run"
    assert not is_done(run_dir, spec)
    with RunLog(run_dir) as log:
        (run_dir / "spec.yaml").write_text(spec)
        assert not is_done(run_dir, spec)
        with log.phase(2, "export"):
            assert not is_done(run_dir, spec)
    assert is_done(run_dir, spec)
    assert not is_done(run_dir, dump_spec(load_spec(tmp_path / "spec.yaml", ["seed=7"])))


def test_every_algorithm_of_the_table_that_samples_has_a_case():
    told = {case.options[0].removeprefix("name=") for case in CASES.values()}
    assert told | {*FROM_DATA, "custom"} == set(ALGORITHMS)


@pytest.mark.parametrize("name", CASES)
def test_the_options_of_a_case_are_those_of_its_algorithm(tmp_path, name):
    path = write_spec(tmp_path)
    why = refused(path, list(options_of(name, load_spec(path), Path("out"))))
    assert not why or "which the trainer does not supply" in why
