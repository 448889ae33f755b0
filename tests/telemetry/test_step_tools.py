"""The tools that measure steps: their figures against records made by hand, and the trainer alone for real."""

import json
import sys
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console
from tiny_models import make_tiny_model
from typer.testing import CliRunner

from slimerl.telemetry.trace import TRACE_DIR, Trace

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import bench_step
import bench_trl
import show_run
import soak

from slimerl.cli import app as slimerl


def write_record(run_dir, steps):
    run_dir.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "time": 0.0, **figures}) for step, figures in enumerate(steps, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def invoked(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(each) for each in arguments])


# --- soak


def flat_step(number):
    """Seconds and memory that go up and down, and a jump in the warm-up."""
    return {
        "time/step": 2.0 + 0.3 * (number % 5),
        "memory/trainer_rss_gib": (0.5 if number < 5 else 1.0) + 0.01 * (number % 3),
        "memory/trainer_heap_gib": 0.2 + 0.01 * (number % 3),
        "memory/engine_rss_gib": 1.6,
        "process/rollout_fds": 200.0 + number % 2,
        "process/rollout_threads": 6.0,
    }


def test_a_run_that_goes_up_and_down_is_flat(tmp_path):
    write_record(tmp_path, [flat_step(number) for number in range(50)])
    result = invoked(soak.main, "--record", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("flat") == 6 + 1, "six figures, and the title"


@pytest.mark.parametrize(
    ("figure", "each_step"),
    [
        ("memory/trainer_rss_gib", 0.002),
        ("memory/trainer_heap_gib", 0.0005),
        ("memory/engine_rss_gib", 0.002),
        ("process/rollout_fds", 0.2),
        ("process/rollout_threads", 0.1),
        ("time/step", 0.02),
    ],
)
def test_what_grows_is_named_and_ends_with_1(tmp_path, figure, each_step):
    steps = [flat_step(number) for number in range(50)]
    for number, step in enumerate(steps):
        step[figure] += each_step * number
    write_record(tmp_path, steps)
    result = invoked(soak.main, "--record", tmp_path)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if "GROWS" in line]
    assert figure in line


def test_a_run_too_short_for_a_slope_is_refused(tmp_path):
    write_record(tmp_path, [flat_step(number) for number in range(4)])
    result = invoked(soak.main, "--record", tmp_path)
    assert result.exit_code == 2
    assert "4 steps are recorded" in result.output


@pytest.mark.parametrize(("tool", "file"), [("soak", "metrics.jsonl"), ("show_run", "events.jsonl")])
def test_a_record_with_a_broken_line_is_refused_by_its_name(tmp_path, tool, file):
    write_record(tmp_path, [flat_step(number) for number in range(50)])
    with (tmp_path / file).open("a") as lines:
        lines.write("half a rec{}\n")
    result = invoked(soak.main, "--record", tmp_path) if tool == "soak" else invoked(show_run.main, tmp_path)
    assert result.exit_code == 2
    assert "is no record" in result.output


# --- bench_step


@pytest.fixture
def measured(tmp_path):
    """Two measured steps and one that warmed up, of 3 s and 5 s."""
    seconds = [60.0, 3.0, 5.0]
    figures = {
        "train/computed_tokens": 1000.0,
        "train/sampled_tokens": 300.0,
        "train/padding_share": 0.1,
        "rollout/samples": 10.0,
        "rollout/mean_response_tokens": 40.0,
        "memory/trainer_rss_gib": 1.5,
        "time/train": 2.0,
    }
    write_record(tmp_path, [figures | {"time/step": each} for each in seconds])
    trainer = Trace(tmp_path, "trainer-0")
    for step, each in enumerate(seconds, start=1):
        trainer.add("train", 100.0 * step, 100.0 * step + each - 1, "main", step)
    trainer.close()
    found = bench_step.Measured("")
    found.add(tmp_path)
    return found


def test_the_figures_of_a_step_leave_the_warm_up_out(measured):
    figures = measured.figures()
    assert figures["seconds per step"] == 4.0
    assert figures["tokens/s computed"] == 250.0
    assert figures["tokens/s computed, while training"] == 500.0
    assert figures["tokens/s useful (sampled)"] == 75.0
    assert figures["padding, share of computed"] == pytest.approx(0.1)
    assert figures["prompts, share of computed"] == pytest.approx(0.51), "1000 - 100 padding - 10 × 39 of responses"
    assert figures["trainer_rss_gib"] == 1.5
    phase = measured.as_json()["phases"]["trainer: train"]
    assert phase["mean_s"] == pytest.approx(3.0)
    assert phase["spread_s"] == pytest.approx(2**0.5)


def test_a_variant_is_compared_with_the_first_by_the_ratio_of_their_steps(measured):
    slower = bench_step.Measured("x=1", measured.phases, [step | {"time/step": 8.0} for step in measured.steps])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(bench_step.figure_table([measured, slower], "tiny"))
    (line,) = [line for line in capture.get().splitlines() if "faster" in line]
    assert "1.00 ×" in line
    assert "0.50 ×" in line


@pytest.mark.slow
def test_the_trainer_alone_is_measured_on_samples_of_the_lengths_asked_for(tmp_path):
    make_tiny_model("qwen3", tmp_path / "base")
    spec = {
        "name": "tiny",
        "model": {"path": str(tmp_path / "base")},
        "data": {"train_path": "unused.jsonl", "max_prompt_tokens": 16},
        "training": {"steps": 100, "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 24},
        "engine": {"context_tokens": 128},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    lengths = ["--prompt-tokens", 20, "--response-tokens", 10]
    result = invoked(bench_step.main, tmp_path / "spec.yaml", "--trainer-only", *lengths, "--steps", 2, "--json")
    assert result.exit_code == 0, result.output
    (variant,) = json.loads(result.output)
    assert variant["steps"] == 2
    assert {"trainer: wait", "trainer: fetch", "trainer: train › optimizer"} <= variant["phases"].keys()
    assert 5 <= variant["figures"]["mean response tokens"] <= 15
    assert variant["figures"]["trainer_rss_gib"] > 0.1
    assert not (tmp_path / "runs").exists(), "a bench leaves no record"


# --- bench_trl


def test_the_ratio_to_trl_is_told_by_step_and_by_token():
    ours, theirs = bench_trl.Side(), bench_trl.Side()
    ours.add([(10.0, 20.0), (12.0, 20.0)])
    theirs.add([(30.0, 25.0), (36.0, 25.0)])
    assert ours.seconds_per_thousand == pytest.approx(22 / (64 * 40) * 1000)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(bench_trl.table({"bf16": {"slimerl": ours, "trl": theirs}}, ["slimerl", "trl"]))
    (line,) = [line for line in capture.get().splitlines() if "faster" in line]
    assert "3.00 ×" in line
    assert "2.40 ×" in line


# --- the trace of a run


def test_the_trace_of_a_run_is_merged_by_a_command(tmp_path):
    written = Trace(tmp_path, "trainer-0")
    with written.span("train", step=1):
        pass
    written.close()
    write_record(tmp_path, [flat_step(1)])
    result = CliRunner().invoke(slimerl, ["trace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "ui.perfetto.dev" in result.output
    merged = tmp_path / "trace.json"
    assert "train" in {event["name"] for event in json.loads(merged.read_text())["traceEvents"]}


def test_a_directory_without_a_trace_is_one_clear_line(tmp_path):
    (tmp_path / TRACE_DIR).mkdir()
    result = CliRunner().invoke(slimerl, ["trace", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no trace" in result.output
