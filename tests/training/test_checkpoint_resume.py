"""Checkpoints of a run: when they are written, what becomes of one that fails, and which one a run goes on from."""

import os
import shutil

import checkpoint_ranks
import checkpointer_ranks
import pytest
import tiny
import xxhash

from slimerl.spec.load import spec_from_tree
from slimerl.training.checkpoint import directory


def run_spec(path, model, /, **changes):
    """A spec whose data is a file; three steps on two ranks, a checkpoint after each."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "rows.jsonl").write_text("rows")
    optimizer = checkpoint_ranks.OPTIMIZER.model_dump()
    tree = {
        "name": "checkpoints",
        "output_dir": str(path / "run"),
        "model": {"path": str(model)},
        "data": {"train_path": str(path / "rows.jsonl")},
        "algorithm": {"name": "sft"},
        "training": {"steps": 6, "prompts_per_step": 12, "parallel": {"data": 2}, "optimizer": optimizer},
        "checkpoint": {"every_steps": 1, "keep_last": 2},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return spec_from_tree(tree, "test")


def names(spec):
    return sorted(path.name for path in (spec.run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory):
    """A run of three steps, and what it reported."""
    path = tmp_path_factory.mktemp("made")
    tiny.write_model(path / "model", "qwen3")
    spec = run_spec(path / "whole", path / "model")
    [(figures, error), _] = ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec)
    assert error == ""
    return path, spec, figures


def test_each_checkpoint_is_complete_by_the_end_and_the_last_two_stay(made):
    _, spec, figures = made
    assert names(spec) == ["step-2", "step-3"]
    steps = [each["checkpoint/step"] for each in figures if "checkpoint/step" in each]
    assert steps[-1] == 3
    assert steps == sorted(steps)
    assert all(each.get("checkpoint/write_s", 1) > 0 for each in figures)
    assert not any("checkpoint/failed" in each for each in figures)


def damaged(path, made, name, *steps):
    """A copy of the run with a bit of the given checkpoints' weights flipped."""
    base, spec, _ = made
    copy = path / name
    shutil.copytree(spec.run_dir.parent, copy)
    for step in steps:
        [weights] = (copy / "run" / "checkpoints" / f"step-{step}").glob("__1_*.distcp")
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    return run_spec(copy, base / "model")


def test_c2_the_newest_whole_one_is_used_and_a_run_never_begins_anew_by_itself(ranks, tmp_path, made):
    """Injected: a flipped bit in the newest, in all; a torn write; another seed, other data, a spec that refuses."""
    base, _, _ = made
    whole, newest, both = (damaged(tmp_path, made, *each) for each in (("w",), ("n", 3), ("b", 2, 3)))
    torn = damaged(tmp_path, made, "t")
    checkpoints = torn.run_dir / "checkpoints"
    (checkpoints / "step-3").rename(checkpoints / "step-3.partial")
    seeded = run_spec(tmp_path / "w", base / "model", seed=5)
    refusing = run_spec(tmp_path / "w", base / "model", checkpoint={"resume": "never"})
    none = run_spec(tmp_path / "none", base / "model")
    other_data = damaged(tmp_path, made, "d")
    other_data.data.train_path.write_text("other rows")
    renamed = damaged(tmp_path, made, "r")
    shutil.rmtree(renamed.run_dir / "checkpoints" / "step-3")
    shutil.copytree(renamed.run_dir / "checkpoints" / "step-2", renamed.run_dir / "checkpoints" / "step-3")

    specs = [whole, newest, torn, both, seeded, refusing, other_data, none, renamed]
    (answers, logged), (answers_of_1, _) = ranks.run(2, checkpointer_ranks.find_load_and_listen, specs)
    assert answers == answers_of_1
    assert answers[0] == (3, b"source at 3", [])
    step, source, [rejected] = answers[1]
    assert (step, source) == (2, b"source at 2")
    assert "step-3" in rejected
    assert "distcp has changed" in rejected
    assert any("damaged and not used: step-3: " in line and "distcp has changed" in line for line in logged)
    assert any("damaged and not used: step-3: its manifest is of another step" in line for line in logged)
    assert names(newest) == ["step-2", "step-3.damaged"]
    assert answers[2] == (2, b"source at 2", [])
    assert "none of the checkpoints" in answers[3]
    assert "step-2" in answers[3]
    assert "--fresh" in answers[3]
    assert names(both) == ["step-2", "step-3"], "nothing is moved where nothing can be used"
    assert "seed was 1234, is 5" in answers[4]
    assert "checkpoint.resume is never" in answers[5]
    assert "data.train_path" in answers[6]
    assert answers[7] is None
    assert answers[8] == (2, b"source at 2", ["step-3: its manifest is of another step"])


def test_c2_a_run_whose_checkpoints_cannot_be_used_does_not_begin_anew(ranks, tmp_path, made):
    """Injected: only one set aside as damaged is left; the newest is a link that leads nowhere."""
    aside, linked = damaged(tmp_path, made, "a"), damaged(tmp_path, made, "l")
    shutil.rmtree(aside.run_dir / "checkpoints" / "step-2")
    (aside.run_dir / "checkpoints" / "step-3").rename(aside.run_dir / "checkpoints" / "step-3.damaged")
    (linked.run_dir / "checkpoints" / "step-4").symlink_to(tmp_path / "nowhere")
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, [aside, linked])
    assert "no checkpoint that can be used, only step-3.damaged" in answers[0]
    assert "--fresh" in answers[0]
    assert answers[1] == (3, b"source at 3", [])
    assert any("passed over" in line and line.endswith(": step-4") for line in logged)


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_c5_a_failed_checkpoint_is_counted_and_the_run_goes_on_or_stops_as_the_spec_says(ranks, tmp_path, made, policy):
    """Injected: rank 1 cannot write more than 20 kB after step 2."""
    spec = run_spec(tmp_path, made[0] / "model", checkpoint={"on_failure": policy})
    for figures, error in ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec, (2,)):
        if policy == "stop":
            assert "the checkpoint of step 2 failed (1 so far; step 1 is the newest)" in error
            assert "rank 1: OSError: [Errno 27] File too large" in error
        else:
            assert error == ""
            assert [each["checkpoint/failed"] for each in figures if "checkpoint/failed" in each] == [1.0]
            assert figures[-1]["checkpoint/step"] == 3
    assert names(spec) == (["step-1"] if policy == "stop" else ["step-1", "step-3"])


FAULTS = {
    "source_state": (0,),
    "sharded_state_dict": (1,),
    "extract_nonpersistent": (1,),
    "_validate_sharding_for_key": (0,),
    "mcore_to_pyt_state_dict": (1,),
    "prepare_local_plan": (1,),
    "prepare_write_data": (1,),
    "preload_tensors": (0, 1),
    "write_preloaded_data": (1,),
    "finish": (0,),
}


def test_c5_an_unexpected_error_on_one_rank_is_told_to_all_and_follows_the_spec(ranks, tmp_path, made):
    """Injected: a RuntimeError on one rank alone in each stage of a save; the other must neither hang nor go on."""
    spec = run_spec(tmp_path, made[0] / "model", checkpoint={"on_failure": "warn"})
    faults = [(name, rank) for name, on_ranks in FAULTS.items() for rank in on_ranks]
    (said, figures), (_, figures_of_1) = ranks.run(2, checkpointer_ranks.run_with_faults, spec, faults, deadline_s=120)
    assert len(said) == len(faults)
    for step, ((name, rank), message) in enumerate(zip(faults, said, strict=True), start=1):
        assert f"the checkpoint of step {step} failed ({step} so far; there is none yet)" in message
        assert f"rank {rank}: " in message
        assert f"rank {1 - rank}: " not in message
        assert f"RuntimeError: injected into {name}" in message
    for each in (figures, figures_of_1):
        assert each["checkpoint/failed"] == len(faults)
        assert each["checkpoint/step"] == len(faults) + 1
    assert names(spec) == [f"step-{len(faults) + 1}"]


CHANGES = {
    "training.optimizer.beta1 was 0.9, is 0.8": {"beta1": 0.8},
    "training.optimizer.beta2 was 0.95, is 0.9": {"beta2": 0.9},
    "training.optimizer.eps was 1e-08, is 1e-06": {"eps": 1e-6},
    "training.optimizer.lr was 0.01, is 0.5": {"lr": 0.5},
    "training.optimizer.weight_decay was 0.1, is 0.5": {"weight_decay": 0.5},
}


def test_c4_what_a_load_would_ignore_is_refused_by_its_name(ranks, tmp_path, made):
    """Injected: a key of the optimizer, the dtype or the model was another one when the checkpoint was written; the run
    is to have fewer steps than it has seen."""
    base, written, _ = made
    before = checkpoint_ranks.OPTIMIZER.model_dump()

    def with_optimizer(**changes):
        return run_spec(base / "whole", base / "model", training={"optimizer": before | changes})

    tiny.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    refused = [with_optimizer(**changes) for changes in CHANGES.values()]
    refused += [run_spec(base / "whole", base / "model", model={"dtype": "bf16"})]
    refused += [run_spec(base / "whole", tmp_path / "model")]
    shorter = run_spec(base / "whole", base / "model", training={"steps": 2})
    free = with_optimizer(clip_grad_norm=0.5)
    answers = ranks.run(2, checkpointer_ranks.find_and_load, [written, free, shorter, *refused])[0]
    assert answers[:2] == [(3, b"source at 3", [])] * 2
    assert "is of step 3, but training.steps = 2; raise it to 3 or more" in answers[2]
    said = [*CHANGES, "model.dtype was fp32, is bf16", "digest of model.path's config.json was"]
    for answer, part in zip(answers[3:], said, strict=True):
        assert part in answer
        assert answer.count(" was ") == 1, "and nothing else is named"


def test_what_a_checkpoint_says_of_its_run_is_what_the_run_began_with(ranks, tmp_path, made):
    """Injected: the file of the data changes after the first step."""
    spec = run_spec(tmp_path, made[0] / "model")
    began_with = spec.data.train_path.read_bytes()
    ranks.run(2, checkpointer_ranks.run_while_the_data_changes, spec)
    digest = xxhash.xxh3_128_hexdigest(began_with)
    assert spec.data.train_path.read_bytes() != began_with
    assert [manifest_of(spec, step).identity["digest of data.train_path"] for step in (2, 3)] == [digest] * 2


def manifest_of(spec, step):
    return directory.read_manifest(spec.run_dir / "checkpoints" / f"step-{step}")


def test_c5_a_disk_without_space_costs_no_older_checkpoint(ranks, tmp_path, made):
    """Injected: the checkpoints lie on a file system that takes one and a half."""
    spec = run_spec(tmp_path, made[0] / "model")
    (spec.run_dir / "checkpoints").mkdir(parents=True)
    size = sum(file.stat().st_size for file in (made[1].run_dir / "checkpoints" / "step-3").iterdir())
    mount = f"mount -t tmpfs -o size={int(size * 1.5)} tmpfs {spec.run_dir / 'checkpoints'}"
    if os.system(f"{mount} 2>/dev/null"):
        pytest.skip("this process may not mount")
    try:
        for figures, error in ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec):
            assert error == ""
            assert figures[-1]["checkpoint/failed"] == 2
        assert names(spec) == ["step-1"]
        assert ranks.run(2, checkpointer_ranks.find_and_load, [spec])[0] == [(1, b"source at 1", [])]
    finally:
        os.system(f"umount {spec.run_dir / 'checkpoints'}")


def test_a_stop_waits_for_the_step_whose_checkpoint_needs_no_reference_model(ranks, tmp_path, made):
    """Injected: the run is asked to stop from the start; its reference model is refreshed after step 2, so that one
    that went on after step 1 or 3 would take another model for its reference."""
    model = made[0] / "model"
    refreshed = {"name": "grpo", "kl_coef": 0.1, "reference_refresh_steps": 2}
    spec = run_spec(tmp_path / "refreshed", model, algorithm=refreshed, checkpoint={"every_steps": 100, "keep_last": 9})
    spec.run_dir.mkdir()
    (spec.run_dir / directory.STOP_FILE).touch()
    for _, error in ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec):
        assert error == ""
    assert names(spec) == ["step-2"]
    assert not (spec.run_dir / directory.STOP_FILE).exists(), "the request is answered"
