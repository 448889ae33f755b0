"""`slimerl stop`: a checkpoint at the end of the step, then the end; the run goes on there when it is started again."""

import json

import pytest
from rank_pool import RankFailed
from safetensors.torch import load_file
from stop_ranks import fine_tune
from tiny_models import make_tiny_model
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor.run_directory import claimed
from slimerl.spec.load import dump_spec, spec_from_tree
from slimerl.training.checkpoint.directory import STOP_FILE

ROWS = [{"id": str(number), "prompt": f"{number}+1=", "response": str(number + 1)} for number in range(12)]


def spec_of(path, **changes):
    tree = {
        "name": "stop",
        "output_dir": str(path / "run"),
        "model": {"path": str(path.parent / "model")},
        "data": {"train_path": str(path.parent / "rows.jsonl")},
        "algorithm": {"name": "sft"},
        "training": {"steps": 4, "prompts_per_step": 4, "parallel": {"data": 2}, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_steps": 100},
    }
    return spec_from_tree(tree | changes, "test")


@pytest.fixture
def runs(tmp_path):
    """Two specs of the same run in directories of their own."""
    make_tiny_model("qwen3", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("stopped", "whole"):
        (tmp_path / name / "run").mkdir(parents=True)
    return spec_of(tmp_path / "stopped"), spec_of(tmp_path / "whole")


def test_a_run_that_is_asked_to_stop_saves_ends_and_goes_on_as_if_it_never_had(ranks, runs):
    """No checkpoint is due for 100 steps; the request comes while step 1 is recorded, and step 2 is the last."""
    stopped, whole = runs
    assert ranks.run(2, fine_tune, stopped, 1) == [[1, 2], [1, 2]]
    assert [path.name for path in (stopped.run_dir / "checkpoints").iterdir()] == ["step-2"]
    assert not (stopped.run_dir / STOP_FILE).exists(), "the request is answered"
    assert not stopped.export_dir.exists()
    assert ranks.run(2, fine_tune, stopped) == [[3, 4], [3, 4]]
    assert ranks.run(2, fine_tune, whole) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    ours, theirs = (load_file(spec.export_dir / "model.safetensors") for spec in runs)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_c5_a_stop_whose_checkpoint_fails_is_an_error_that_names_it(ranks, runs):
    """Injected: a file in the place of the directory of checkpoints; a failure is a warning by the spec."""
    stopped, _ = runs
    (stopped.run_dir / "checkpoints").touch()
    with pytest.raises(RankFailed, match=r"asked to stop, but .*the checkpoint of step 2 failed"):
        ranks.run(2, fine_tune, stopped, 1)
    assert not (stopped.run_dir / STOP_FILE).exists(), "the request is answered"


def test_the_command_leaves_the_request_where_the_trainer_looks(tmp_path):
    spec = spec_of(tmp_path)
    with claimed(spec, fresh=False):
        (spec.run_dir / "spec.yaml").write_text(dump_spec(spec))
        result = CliRunner().invoke(app, ["stop", str(spec.run_dir)])
    assert result.exit_code == 0, result.stderr
    assert (spec.run_dir / STOP_FILE).exists()


@pytest.mark.parametrize("lock", [False, True])
def test_the_command_refuses_where_no_run_is(tmp_path, lock):
    """Injected: the run has ended, with its lock file left and without one."""
    spec = spec_of(tmp_path)
    with claimed(spec, fresh=False):
        (spec.run_dir / "spec.yaml").write_text(dump_spec(spec))
    if not lock:
        (spec.run_dir / "lock").unlink()
    result = CliRunner().invoke(app, ["stop", str(spec.run_dir)])
    assert (result.exit_code, "nothing to stop" in result.stderr) == (2, True)
    assert not (spec.run_dir / STOP_FILE).exists()


def test_the_command_refuses_what_would_never_stop(tmp_path):
    """Injected: a directory that is no run's, and a run without checkpoints."""
    result = CliRunner().invoke(app, ["stop", str(tmp_path)])
    assert (result.exit_code, "is no run's directory" in result.stderr) == (2, True)
    spec = spec_of(tmp_path, checkpoint={"every_steps": 0})
    spec.run_dir.mkdir(parents=True)
    (spec.run_dir / "spec.yaml").write_text(dump_spec(spec))
    result = CliRunner().invoke(app, ["stop", str(spec.run_dir)])
    assert (result.exit_code, "keeps no checkpoints" in result.stderr) == (2, True)
    assert not (spec.run_dir / STOP_FILE).exists()
