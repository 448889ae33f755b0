"""SIGTERM to `slimerl run`, as SLURM, Kubernetes and systemd send it: save, then end, within a time."""

import signal

import pytest
from tiny_run import start, write_spec

from slimerl.telemetry import read_records


def fine_tuning(directory, **deadlines):
    return write_spec(
        directory,
        algorithm={"name": "sft"},
        training={"steps": 100_000},
        checkpoint={"every_steps": 100_000},
        deadlines=deadlines,
    )


def steps(run):
    return [record["step"] for record in read_records(run.directory / "metrics.jsonl")]


@pytest.mark.slow
def test_a_terminated_run_saves_its_step_and_goes_on_there(tmp_path):
    spec = fine_tuning(tmp_path)
    run = start(spec)
    run.until_step(2)
    run.process.terminate()
    code, output = run.finish(within_s=60)
    last = steps(run)[-1]
    assert code == 143, output
    assert f"goes on after step {last}" in output
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == [f"step-{last}"]
    assert run.left_behind() == []

    run = start(spec, f"training.steps={last + 2}", keep_record=True, fresh=False)
    code, output = run.finish()
    assert code == 0, output
    assert steps(run) == list(range(last + 3))
    assert (run.directory / "model" / "config.json").exists()


@pytest.mark.slow
def test_c5_what_is_not_saved_in_time_is_named_and_not_waited_for(tmp_path):
    """Injected: a rank that stands still."""
    run = start(fine_tuning(tmp_path, terminate_s=1.0, shutdown_s=2.0))
    run.until_step(1)
    run.find("-u -m slimerl.training").send_signal(signal.SIGSTOP)
    run.process.terminate()
    code, output = run.finish(within_s=60)
    assert code == 143, output
    assert "it has no checkpoint; waited 1 s for the checkpoint of the step to be saved" in output
    assert run.left_behind() == []
