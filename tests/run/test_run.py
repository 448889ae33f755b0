"""Whole runs, as a user starts them: they learn, agree with the engine, and end without leaving anything behind."""

import os
import re
import signal

import pytest
import torch
import transformers
from tiny_run import RUN_S, interrupt, start, write_spec

from slimerl.resilience.deadline import Deadline
from slimerl.telemetry import read_records
from slimerl.telemetry.report import series


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return write_spec(tmp_path_factory.mktemp("tiny-run"))


def records(run):
    return read_records(run.directory / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["dp2", "tp2"])
def test_a_run_trains_proves_each_sync_and_exports_what_it_trained(spec, grid):
    overrides = ["training.parallel.data=1", "training.parallel.tensor=2"] if grid == "tp2" else []
    run = start(spec, *overrides)
    run.until_step(1)
    code, output = run.finish()
    assert code == 0, output

    steps = [record for record in records(run) if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["agreement/mean_abs_logprob_delta"] <= 1e-4 for record in steps)
    evaluations = [record["step"] for record in records(run) if "eval/accuracy" in record]
    assert evaluations == [0, 2]
    assert "held-out accuracy" in output

    before = transformers.AutoModelForCausalLM.from_pretrained(spec.parent / "base").state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(run.directory / "model").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert run.left_behind() == []


@pytest.mark.slow
def test_an_engine_of_its_own_evaluates_while_the_run_trains(spec):
    apart = ("evaluation.engines=1", "evaluation.background=true", "evaluation.every_steps=2")
    overrides = ("training.steps=4", "engine.replicas=2", "cluster.placement=disaggregated", *apart)
    run = start(spec, *overrides)
    code, output = run.finish()
    assert code == 0, output
    found = records(run)
    evaluated = {record["step"]: record["eval/prompts"] for record in found if "eval/prompts" in record}
    assert evaluated == {0: 10, 2: 10, 4: 10}
    assert {record["rollout/engines"] for record in found if "train/loss" in record} == {1.0}
    log = (run.directory / "logs" / "rollout.log").read_text()
    written = re.findall(r"weights held for version (\d): (.*)", log)
    both = "engine-0, engine-1"
    assert written == [("0", both), ("1", "engine-0"), ("2", both), ("3", "engine-0"), ("4", both)]
    assert run.left_behind() == []


@pytest.mark.slow
def test_sft_runs_on_the_same_trainer_without_engines(tmp_path):
    spec = write_spec(tmp_path, algorithm={"name": "sft"}, training={"steps": 8})
    code, output = start(spec).finish()
    assert code == 0, output
    losses = series(read_records(tmp_path / "run" / "metrics.jsonl"), "train/loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0]


ROLES = {
    "engine-0": "slimerl.engine ",
    "a rank of trainer": "-u -m slimerl.training",
}


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a5_the_kill_of_any_role_ends_the_run_by_name_and_leaves_nothing(spec, role):
    run = start(spec, "training.steps=1000", "resilience.run_restarts=0", "resilience.engine_restarts=0")
    run.until_step(1)
    os.kill(run.find(ROLES[role]).pid, signal.SIGKILL)
    code, output = run.finish(within_s=60)
    assert code == 1
    assert f"failed: {role.split()[-1]} " in output
    assert run.left_behind() == []


@pytest.mark.slow
def test_a5_the_kill_of_the_conductor_takes_every_role_with_it(spec):
    run = start(spec, "training.steps=1000")
    run.until_step(1)
    run.process.kill()
    run.process.wait()
    Deadline("every role to be gone", 60).wait_until(
        lambda: not run.left_behind(), detail=lambda: str(run.left_behind())
    )


@pytest.mark.slow
def test_ctrl_c_ends_the_run_with_130_and_until_then_its_directory_is_its_own(spec):
    """An engine that came by load ends with the others."""
    by_load = ("engine.elastic.max=2", "engine.elastic.trainer_idle=0.01", "engine.elastic.cooldown_steps=1")
    run = start(spec, "training.steps=1000", "cluster.placement=disaggregated", *by_load)
    run.until_step(1)
    code, output = start(spec, keep_record=True).finish()
    assert code == 2
    assert "is in use" in output
    second = Deadline("a second engine to serve", RUN_S)
    second.wait_until(lambda: any(record.get("rollout/engines") == 2 for record in records(run)))
    run.note_shared_memory()
    interrupt(run)
    code, output = run.finish(within_s=60)
    assert code == 130
    assert "interrupted" in output
    assert "engine-1 is added (the trainer waited " in output
    assert run.left_behind() == []
