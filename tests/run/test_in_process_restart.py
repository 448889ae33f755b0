"""A collective that fails once costs a trainer no process: its ranks begin anew where they are, and the run is the same
bit for bit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import write_spec

from slimerl.telemetry import read_records

RECORDER = Path(__file__).parent / "recorder"
"""On the path of the run: breaks what it is told to from inside."""
STEPS = 4


def supervised(directory: Path, restarts: int = 2) -> Path:
    return write_spec(
        directory,
        algorithm={"name": "sft"},
        training={"steps": STEPS, "optimizer": {"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 2, "decay": "linear"}},
        checkpoint={"every_steps": 3, "local_every_steps": 1, "local_dir": str(directory / "disk")},
        resilience={"in_process_restarts": restarts},
    )


def train(spec: Path, faults: str = "") -> "subprocess.CompletedProcess[str]":
    """The trainer role, as torchrun starts it."""
    path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "SLIMERL_TEST_FAULTS": faults, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "slimerl.training", str(spec)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def weights(spec: Path) -> dict:
    return load_file(spec.parent / "run" / "model" / "model.safetensors")


def records(spec: Path) -> list[dict]:
    return read_records(spec.parent / "run" / "metrics.jsonl")


def alarms(spec: Path) -> list[dict]:
    events = read_records(spec.parent / "run" / "events.jsonl")
    return [event for event in events if event.get("name") == "restarted in process"]


@pytest.mark.timeout(400)
def test_ranks_begin_anew_in_their_processes_and_train_the_same(tmp_path):
    """Injected: in step 3, while the local checkpoint of step 2 is written and there is no shared one yet, the links
    between the ranks break; when they are there again, a collective fails on one of them alone, and the other one waits
    for it."""
    whole, broken = (supervised(tmp_path / name) for name in ("whole", "broken"))
    undisturbed = train(whole)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    done = train(broken, "links:3,collective:5")
    assert done.returncode == 0, done.stderr[-5000:]
    assert [record["step"] for record in records(broken)] == list(range(STEPS + 1))
    for figure in ("train/loss", "train/lr", "train/grad_norm", "eval/loss"):
        assert [each.get(figure) for each in records(broken)] == [each.get(figure) for each in records(whole)], figure
    ours, theirs = weights(broken), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert [alarm["step"] for alarm in alarms(broken)] == [1, 1]
    assert "1 of 2" in alarms(broken)[0]["text"]
    assert re.search(r"rank 1: RuntimeError: gloo.*2 of 2", alarms(broken)[1]["text"])
    assert [record.get("resilience/in_process_restarts") for record in records(broken)[1:]] == [0, 2, 2, 2]
    pids = {json.loads(path.read_text().splitlines()[0])["pid"] for path in (tmp_path / "broken/run/trace").iterdir()}
    assert len(pids) == 2, "the processes are those of the beginning"
    assert alarms(whole) == []


@pytest.mark.timeout(200)
def test_a_rank_that_has_begun_anew_often_holds_no_more_than_one_that_did_so_once(tmp_path, monkeypatch):
    """Injected: a collective fails in step 3, and then each time that step 2 is done anew."""
    spec, held = supervised(tmp_path, restarts=5), tmp_path / "held"
    monkeypatch.setenv("SLIMERL_TEST_HELD", str(held))
    done = train(spec, ",".join(f"collective:{training}" for training in range(3, 8)))
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(alarms(spec)) == 5
    threads_and_descriptors = held.read_text().splitlines()
    assert len(threads_and_descriptors) == 2 + 5 + 3, "steps 1, 2; the first of each attempt that fails; the rest"
    assert len(set(threads_and_descriptors[3:8])) == 1, threads_and_descriptors


@pytest.mark.timeout(200)
def test_an_error_of_the_program_ends_all_ranks_as_ever(tmp_path):
    spec = supervised(tmp_path)
    done = train(spec, "program:3")
    assert done.returncode == 1
    assert "an error of the program" in done.stderr
    assert alarms(spec) == []
    assert [record["step"] for record in records(spec)] == [0, 1, 2]
