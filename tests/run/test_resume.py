"""A whole run that is killed goes on where it was: same tokens, same weights, one record."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_run import start, teach_digits, write_spec

from slimerl.resilience.deadline import Deadline
from slimerl.telemetry import read_records
from slimerl.training.checkpoint.local import newest_checkpoint

STEPS = 4
SAMPLES = 128
"""Of a step."""
RECORDER = Path(__file__).parent / "recorder"
"""On the path of the run: writes down every sample that the trainer fetches."""


def spec_of(directory: Path) -> Path:
    return write_spec(
        directory,
        training={
            "steps": STEPS,
            "optimizer": {"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 2, "decay": "linear"},
        },
        rollout={"samples_per_prompt": SAMPLES // 8, "max_new_tokens": 6},
        checkpoint={"every_steps": 2, "keep_last": 1},
        cluster={"placement": "disaggregated"},
    )


def begin(spec: Path, monkeypatch, part: str, *overrides: str, fresh: bool = True):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("SLIMERL_TEST_RECORD", str(spec.parent / f"{part}.jsonl"))
    return start(spec, *overrides, keep_record=not fresh, fresh=fresh)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The spec of a run that nothing disturbed; its model has learnt something already."""
    spec = spec_of(tmp_path_factory.mktemp("undisturbed"))
    teach_digits(spec.parent / "base")
    with pytest.MonkeyPatch.context() as patch:
        code, output = begin(spec, patch, "whole").finish()
    assert code == 0, output
    return spec


def copy_of(whole: Path, directory: Path) -> Path:
    """The spec of the same run, not yet begun."""
    shutil.copytree(whole.parent / "base", directory / "base")
    shutil.copy(whole.parent / "data.jsonl", directory)
    return spec_of(directory)


def same_weights(run: Path, reference: Path) -> bool:
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (run, reference))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def tokens_of(spec: Path, part: str) -> dict[str, list]:
    """Sample id → tokens, what was sampled of them."""
    lines = (spec.parent / f"{part}.jsonl").read_text().splitlines()
    return {record["id"]: record["tokens"] for record in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c1_a_killed_run_goes_on_with_the_same_tokens_and_weights_bit_for_bit(whole, tmp_path, monkeypatch):
    """Injected: SIGKILL of the conductor in the step after a checkpoint, with a changing learning rate."""
    killed = copy_of(whole, tmp_path)

    run = begin(killed, monkeypatch, "before")
    run.until_step(3)
    run.process.kill()
    run.process.wait()
    Deadline("every role to be gone", 60).wait_until(lambda: not run.left_behind())
    run_dir = run.directory
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-2"]

    run = begin(killed, monkeypatch, "after", fresh=False)
    code, output = run.finish()
    assert code == 0, output

    expected = tokens_of(whole, "whole")
    before, after = tokens_of(killed, "before"), tokens_of(killed, "after")
    assert len(expected) == STEPS * SAMPLES
    assert len(after) == 2 * SAMPLES, "steps 3 and 4 alone were done again"
    assert before | after == expected
    assert before.keys() & after.keys(), "step 3 was done before and after the kill"
    assert same_weights(run_dir, whole.parent / "run")

    records, reference = (read_records(each / "metrics.jsonl") for each in (run_dir, whole.parent / "run"))
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    for figure in ("train/lr", "train/loss", "train/grad_norm", "rollout/generated_tokens", "rollout/mean_reward"):
        assert [record.get(figure) for record in records] == [record.get(figure) for record in reference], figure
    assert len({record["train/lr"] for record in records[1:]}) > 1
    assert all(record["train/grad_norm"] > 0 for record in records[1:])
    resumed = [event for event in read_records(run_dir / "events.jsonl") if event.get("name") == "resumed"]
    assert [event["step"] for event in resumed] == [2]

    code, output = begin(killed, monkeypatch, "again", fresh=False).finish()
    assert code == 2
    assert "finished" in output
    assert "--fresh" in output


def trainings_begun(run: Path) -> list[float]:
    """When, in seconds."""
    events = read_records(run / "events.jsonl")
    return [event["time"] for event in events if event.get("phase") == "train" and event["edge"] == "start"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_broken_links_of_trainer_ranks_cost_no_process_and_the_next_time_the_run_starts_over(
    whole, tmp_path, monkeypatch
):
    """Injected: the ranks' connections break in step 4, and again when they have come that far once more; one restart
    in place is allowed. The rollout role gives up what it has made since the checkpoint of step 2."""
    spec = copy_of(whole, tmp_path)
    monkeypatch.setenv("SLIMERL_TEST_FAULTS", "links:4,links:6")
    kept = ("checkpoint.every_steps=1", "checkpoint.keep_last=2", "resilience.in_process_restarts=1")
    code, output = begin(spec, monkeypatch, "broken", *kept).finish()
    assert code == 0, output
    assert tokens_of(spec, "broken") == tokens_of(whole, "whole")
    assert same_weights(spec.parent / "run", whole.parent / "run")
    events = read_records(spec.parent / "run" / "events.jsonl")
    told = {name: [each["text"] for each in events if each.get("name") == name] for name in ("restarted", "resumed")}
    in_process = [each["text"] for each in events if each.get("name") == "restarted in process"]
    assert len(in_process) == 1
    assert "1 of 1" in in_process[0]
    assert len(told["restarted"]) == 1, "the run started over once, for the second fault"
    assert len(told["resumed"]) == 2
    begun = trainings_begun(spec.parent / "run")
    assert len(begun) == 8, "steps 1, 2, 3, 4; 3, 4; 3, 4"
    anew_s, over_s = begun[4] - begun[3], begun[6] - begun[5]
    print(f"from a fault to the next training: {anew_s:.1f} s in process, {over_s:.1f} s where the run started over")
    assert anew_s < over_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c1_a_run_whose_trainer_is_killed_goes_on_from_its_local_checkpoint_bit_for_bit(whole, tmp_path, monkeypatch):
    """Injected: SIGKILL of the trainer before the first shared checkpoint; the run starts over by itself."""
    killed, disk = copy_of(whole, tmp_path), tmp_path / "disk"
    placed = (f"checkpoint.local_dir={disk}", "checkpoint.every_steps=3")
    run = begin(killed, monkeypatch, "local", *placed)
    checkpoints = run.directory / "checkpoints"
    Deadline("a local checkpoint", 150).wait_until(lambda: (newest_checkpoint(checkpoints) or 0) > 0)
    run.find("slimerl.training").kill()
    code, output = run.finish()
    assert code == 0, output

    events = read_records(run.directory / "events.jsonl")
    [resumed] = [event for event in events if event.get("name") == "resumed"]
    assert resumed["step"] in (1, 2)
    assert resumed["text"].startswith(f"from {disk}/")
    assert tokens_of(killed, "local") == tokens_of(whole, "whole")
    assert same_weights(run.directory, whole.parent / "run")
    records, reference = (read_records(each / "metrics.jsonl") for each in (run.directory, whole.parent / "run"))
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    for figure in ("train/lr", "train/loss", "train/grad_norm", "rollout/generated_tokens", "rollout/mean_reward"):
        assert [record.get(figure) for record in records] == [record.get(figure) for record in reference], figure
    assert (checkpoints / "step-3").is_dir()
    assert list(disk.iterdir()) == [], "nobody will ask for them"


@pytest.mark.slow
def test_colocated_roles_in_turns_sample_and_train_the_same_as_roles_with_memory_of_their_own(
    whole, tmp_path, monkeypatch
):
    """The trainer's weights, gradients and optimizer state go away and come back in every step, over another transport
    than the other run's."""
    spec = copy_of(whole, tmp_path)
    placed = ("cluster.placement=colocated", "cluster.turns=always", "sync.transport=broadcast")
    code, output = begin(spec, monkeypatch, "colocated", *placed).finish()
    assert code == 0, output
    assert tokens_of(spec, "colocated") == tokens_of(whole, "whole")
    assert same_weights(spec.parent / "run", whole.parent / "run")
    steps, reference = (
        [record for record in read_records(each / "metrics.jsonl") if record["step"]]
        for each in (spec.parent / "run", whole.parent / "run")
    )
    for figure in ("train/loss", "train/grad_norm", "rollout/mean_reward"):
        assert [record[figure] for record in steps] == [record[figure] for record in reference], figure
    assert all(record["time/hand over"] > 0 and record["sync/weights_turn_s"] > 0 for record in steps), "turns"
    assert not any("time/hand over" in record for record in reference)
