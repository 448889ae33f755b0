"""Checkpoints on the nodes' own disks: which of both tiers a run goes on from, and whose parts it takes and removes."""

import shutil

import checkpointer_ranks
import msgspec
import pytest
import tiny
import torch
from test_checkpoint_resume import names, run_spec

from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.local import Note, Offer, Offers, Place


def local_spec(path, model, disk=None, /, **changes):
    """Three steps on two ranks: a shared checkpoint after the second, a local one after each."""
    often = {"every_steps": 2, "local_every_steps": 1, "local_dir": str(disk or path / "disk")}
    return run_spec(path, model, checkpoint=often | changes.pop("checkpoint", {}), **changes)


def run_root(spec):
    return spec.checkpoint.local_dir / note_of(spec).run


def note_of(spec):
    return local.read_note(spec.run_dir / "checkpoints")


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory):
    """A run of three steps, and what it reported."""
    path = tmp_path_factory.mktemp("made")
    tiny.write_model(path / "model", "qwen3")
    spec = local_spec(path / "whole", path / "model")
    [(figures, error), _] = ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec)
    assert error == ""
    return path, spec, figures


def copied(path, made, name, **changes):
    """The same run in other directories, its checkpoints too."""
    base, spec, _ = made
    shutil.copytree(spec.run_dir.parent, path / name)
    copy = local_spec(path / name, base / "model", **changes)
    noted_as_of(copy, copy.run_dir)
    return copy


def noted_as_of(spec, run_dir):
    """As if the run directory had been there when its local checkpoints were written."""
    noted = msgspec.structs.replace(note_of(spec), local_dir=str(spec.checkpoint.local_dir), place=Place.of(run_dir))
    local.write_note(spec.run_dir / "checkpoints", noted)


def part(spec, rank):
    return run_root(spec) / f"rank-{rank}" / "step-3" / f"rank-{rank}.pt"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def signed_anew(spec, rank, **identity):
    """As if another had written that part: its manifest is whole, and says something else."""
    where = part(spec, rank).parent
    manifest = directory.read_manifest(where)
    changed = msgspec.structs.replace(manifest, identity=manifest.identity | identity)
    directory.write_manifest(where, changed)


def test_between_two_shared_checkpoints_each_rank_has_a_local_one_of_the_newest_step(made):
    _, spec, figures = made
    assert names(spec) == ["local.json", "step-2"]
    for rank in (0, 1):
        assert [each.name for each in (run_root(spec) / f"rank-{rank}").iterdir()] == ["step-3"]
    assert local.newest_checkpoint(spec.run_dir / "checkpoints") == 3
    assert figures[-1]["checkpoint/local_step"] == 3
    assert not any("checkpoint/local_failed" in each for each in figures)


def test_c2_the_newest_of_both_tiers_is_used_and_what_is_passed_over_is_said(ranks, tmp_path, made):
    """Injected: a flipped bit in one part; the disk of one rank is lost; one part is of another run, one of another
    time that the step was saved; a shared one of that step; all of the disks is lost."""
    whole, flipped, lost, stranger, mixed, both = (copied(tmp_path, made, name) for name in "wflsmb")
    flip(part(flipped, 1))
    shutil.rmtree(run_root(lost) / "rank-0")
    signed_anew(stranger, 1, **{local.RUN: "another"})
    signed_anew(mixed, 0, **{local.SAVE: "another"})
    (both.run_dir / "checkpoints" / "step-2").rename(both.run_dir / "checkpoints" / "step-3")
    seeded = copied(tmp_path, made, "seeded", seed=5)
    refusing = copied(tmp_path, made, "refusing", checkpoint={"resume": "never"})
    gone = copied(tmp_path, made, "gone")
    shutil.rmtree(gone.checkpoint.local_dir)
    specs = [whole, flipped, lost, stranger, mixed, both, gone, seeded, refusing]
    (answers, logged), (answers_of_1, _) = ranks.run(2, checkpointer_ranks.find_load_and_listen, specs)
    assert answers[:7] == answers_of_1[:7]
    assert answers[0] == (3, b"source at 3", [])
    assert answers[5] == (3, b"source at 3", []), "the local one is at hand"
    assert answers[6] == (2, b"source at 2", [])
    said = [
        "local step-3: rank 1: the content of rank-1.pt has changed (digest)",
        "local step-3: the parts of rank 0 are not on their nodes",
        "local step-3: the parts of rank 1 are not on their nodes",
    ]
    for answer, fault in zip(answers[1:4], said, strict=True):
        assert answer == (2, b"source at 2", [fault])
        assert any(f"is damaged and not used: {fault}" in line for line in logged)
    assert any(line.endswith("its manifest is of another run or step") for line in logged)
    step, _, rejected = answers[4]
    assert step == 2
    assert sorted(rejected) == [f"local step-3: the parts of rank {rank} are not on their nodes" for rank in (0, 1)]
    assert "seed was 1234, is 5" in answers[7]
    assert "checkpoint.resume is never" in answers[8]


def test_c3_another_layout_goes_on_from_the_shared_checkpoint(ranks, tmp_path, made):
    other = copied(tmp_path, made, "other", training={"parallel": {"data": 1}})
    [(answers, logged)] = ranks.run(1, checkpointer_ranks.find_load_and_listen, [other])
    assert answers == [(2, b"source at 2", [])]
    assert any(line.endswith("it is of another training.parallel") for line in logged)


def without_shared(path, made, name, **changes):
    spec = copied(path, made, name, **changes)
    shutil.rmtree(spec.run_dir / "checkpoints" / "step-2")
    return spec


def test_c2_a_run_whose_only_checkpoint_went_with_a_node_begins_anew_and_says_so(ranks, tmp_path, made):
    """Injected: no shared checkpoint yet, and the disk of one rank is lost; the spec names another disk; the version
    of a library is another one."""
    alone, lost, moved, upgraded = (without_shared(tmp_path, made, name) for name in "alnu")
    shutil.rmtree(run_root(lost) / "rank-1")
    moved = local_spec(tmp_path / "n", made[0] / "model", tmp_path / "elsewhere")
    for rank in (0, 1):
        signed_anew(upgraded, rank, **{local.FORMAT: "torch 1"})
    specs = [alone, lost, moved, upgraded]
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, specs)
    assert answers[:2] == [(3, b"source at 3", []), None]
    assert any("the run begins anew: it had a local checkpoint of step 3 alone" in line for line in logged)
    assert f"but checkpoint.local_dir is {tmp_path / 'elsewhere'}; set it back" in answers[2]
    assert "it was written by torch 1" in answers[3]
    assert "--fresh" in answers[3]

    [(figures, error), _] = ranks.run(2, checkpointer_ranks.run_with_checkpoints, lost)
    assert error == ""
    assert not any("checkpoint/local_failed" in each for each in figures), "what was left of the first time is gone"
    assert ranks.run(2, checkpointer_ranks.find_and_load, [lost])[0] == [(3, b"source at 3", [])]


def test_a_run_that_goes_on_without_local_checkpoints_forgets_them(ranks, tmp_path, made):
    """Injected: the spec names a directory, none, and the same again."""
    here = copied(tmp_path, made, "here")
    without = local_spec(tmp_path / "here", made[0] / "model", checkpoint={"local_dir": None})
    ranks.run(2, checkpointer_ranks.run_to_its_end, without)
    assert local.newest_checkpoint(here.run_dir / "checkpoints") == 2
    assert ranks.run(2, checkpointer_ranks.find_and_load, [here])[0] == [(2, b"source at 2", [])]


def test_a_copy_of_a_run_directory_leaves_the_local_checkpoints_to_the_run_that_has_them(ranks, tmp_path, made):
    """Injected: a run directory that was copied, with and without a shared checkpoint, and one that was moved."""
    run, alone = copied(tmp_path, made, "run"), without_shared(tmp_path, made, "alone")
    copy, copy_alone = (
        local_spec(tmp_path / f"{name}-2", made[0] / "model", disk.checkpoint.local_dir)
        for name, disk in (("run", run), ("alone", alone))
    )
    shutil.copytree(run.run_dir, copy.run_dir)
    shutil.copytree(alone.run_dir, copy_alone.run_dir)
    moved = local_spec(tmp_path / "moved", made[0] / "model", alone.checkpoint.local_dir)
    alone.run_dir.rename(moved.run_dir)
    before = {path: path.stat().st_mtime_ns for path in run_root(run).rglob("*")}
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, [copy, copy_alone, moved])
    assert answers[0] == (2, b"source at 2", [])
    assert any(
        f"step 3 is passed over: it is of the run in {run.run_dir}, of which this is a copy" in line for line in logged
    )
    assert "the only checkpoint of the run is a local one: it is of the run in" in answers[1]
    assert answers[2] == (3, b"source at 3", [])
    ranks.run(2, checkpointer_ranks.run_to_its_end, copy)
    assert {path: path.stat().st_mtime_ns for path in run_root(run).rglob("*")} == before


def test_a_moved_run_that_goes_on_from_its_shared_checkpoint_leaves_nothing_on_the_nodes(ranks, tmp_path, made):
    """Injected: a run directory that was moved, and one that was copied, whose parts are of the run that has them."""
    run, other = copied(tmp_path, made, "run"), copied(tmp_path, made, "other")
    moved, copy = (
        local_spec(tmp_path / f"{name}-2", made[0] / "model", disk.checkpoint.local_dir)
        for name, disk in (("run", run), ("other", other))
    )
    run.run_dir.rename(moved.run_dir)
    shutil.copytree(other.run_dir, copy.run_dir)
    for spec in (moved, copy):
        ranks.run(2, checkpointer_ranks.run_to_its_end, spec)
    assert list(moved.checkpoint.local_dir.iterdir()) == []
    assert list(copy.checkpoint.local_dir.iterdir()) == [run_root(other)]


def test_c2_a_note_that_is_not_what_was_written_is_said_and_no_reason_to_begin_anew(ranks, tmp_path, made):
    """Injected: an empty note, with a shared checkpoint and without."""
    torn, alone = copied(tmp_path, made, "torn"), without_shared(tmp_path, made, "alone")
    for spec in (torn, alone):
        (spec.run_dir / "checkpoints" / local.NOTE).write_text("")
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, [torn, alone])
    assert answers[0] == (2, b"source at 2", [])
    assert any(line.endswith("no checkpoints that can be used: local.json") for line in logged)
    assert "holds no checkpoint that can be used, only local.json" in answers[1]


def test_a_local_checkpoint_that_other_settings_leave_behind_is_said(ranks, tmp_path, made):
    """Injected: another directory, and none."""
    run = copied(tmp_path, made, "run")
    places = {"elsewhere": str(tmp_path / "elsewhere"), "none": None}
    others = [
        local_spec(tmp_path / "run", made[0] / "model", checkpoint={"local_dir": each}) for each in places.values()
    ]
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, others)
    assert [step for step, _, _ in answers] == [2, 2]
    where = f"the local checkpoint of step 3 is passed over: it is in {run.checkpoint.local_dir}, but"
    assert [line.removeprefix(where) for line in logged if line.startswith(where)] == [
        f" checkpoint.local_dir is {each}" for each in places.values()
    ]


def test_c2_a_disk_that_cannot_be_read_costs_the_local_checkpoints_alone(ranks, tmp_path, made):
    """Injected: on one rank every look at its disk is an I/O error."""
    broken = copied(tmp_path, made, "broken")
    disk = broken.checkpoint.local_dir
    find, go_on = checkpointer_ranks.find_and_load, checkpointer_ranks.run_with_checkpoints
    lacking = "local step-3: the parts of rank 1 are not on their nodes"
    [found, _] = ranks.run(2, checkpointer_ranks.with_a_broken_disk, disk, find, [broken])
    assert found == [(2, b"source at 2", [lacking])]
    shutil.rmtree(broken.run_dir / "checkpoints" / "step-2")
    (figures, error), _ = ranks.run(2, checkpointer_ranks.with_a_broken_disk, disk, go_on, broken)
    assert error == ""
    assert [each["checkpoint/local_failed"] for each in figures if each] == [1.0, 2.0, 3.0]


def test_parts_of_ranks_that_a_node_has_no_more_go(ranks, tmp_path, made):
    """Injected: a run goes on from its shared checkpoint with fewer ranks; on their disk lie parts of the others."""
    model = made[0] / "model"
    ranks.run(2, checkpointer_ranks.run_with_checkpoints, local_spec(tmp_path / "fewer", model))
    fewer = local_spec(tmp_path / "fewer", model, training={"parallel": {"data": 1}})
    ranks.run(1, checkpointer_ranks.run_with_checkpoints, fewer)
    [run] = fewer.checkpoint.local_dir.iterdir()
    assert [each.name for each in run.iterdir()] == ["rank-0"]


TWO_NODES = {"cluster": {"gpus_per_node": 1}, "checkpoint": {"local_copies": 2}}


@pytest.fixture(scope="module")
def made_twice(ranks, made, tmp_path_factory):
    """As `made`, each rank on a node of its own, which has a copy of the other's part."""
    path = tmp_path_factory.mktemp("twice")
    spec = local_spec(path / "whole", made[0] / "model", **TWO_NODES)
    [(figures, error), _] = ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec)
    assert error == ""
    return made[0], spec, figures


def tensors_of(path):
    return list(torch.load(path, weights_only=False).tensors)


def test_c2_what_a_lost_node_had_comes_from_its_copy(ranks, tmp_path, made_twice):
    """Injected: the disk of one rank is lost; a bit flipped in one part, in one of each, in one and its copy."""
    names_of_cases = ("lost", "flipped", "crossed", "both")
    lost, flipped, crossed, both = (copied(tmp_path, made_twice, name, **TWO_NODES) for name in names_of_cases)
    wanted = [tensors_of(part(lost, rank)) for rank in (0, 1)]
    shutil.rmtree(run_root(lost) / "rank-0")
    for spec, rank in ((flipped, 1), (crossed, 0), (crossed, 1), (both, 0)):
        flip(part(spec, rank))
    flip(part(both, 1).with_name("rank-0.pt"))
    [(answers, logged), _] = ranks.run(2, checkpointer_ranks.find_load_and_listen, [lost, flipped, crossed, both])
    assert answers[:3] == [(3, b"source at 3", [])] * 3
    assert answers[3][0] == 2
    assert "rank 1: the content of rank-0.pt has changed (digest)" in answers[3][2][0]
    for spec in (lost, flipped, crossed):
        found = [tensors_of(part(spec, rank)) for rank in (0, 1)]
        assert all(map(torch.equal, found[0] + found[1], wanted[0] + wanted[1])), "bit for bit, on the disk again"
        assert [len(each) for each in found] == [len(each) for each in wanted]
    told = [line for line in logged if "copies take the place of the parts of rank" in line]
    assert [line.partition("of rank ")[2].partition(":")[0] for line in told] == ["0", "1", "0, 1"]


@pytest.mark.parametrize("policy", ["warn", "stop"])
def test_c5_a_failed_local_checkpoint_is_counted_and_costs_no_older_one(ranks, tmp_path, made, policy):
    """Injected: rank 1 cannot write more than 20 kB after step 2."""
    rare = {"every_steps": 9, "on_failure": policy}
    spec = local_spec(tmp_path, made[0] / "model", checkpoint=rare)
    for figures, error in ranks.run(2, checkpointer_ranks.run_with_checkpoints, spec, (2,)):
        if policy == "stop":
            assert "the local checkpoint of step 2 failed (1 so far; step 1 is the newest)" in error
            assert "rank 1: OSError: [Errno 27] File too large" in error
        else:
            assert error == ""
            assert [each["checkpoint/local_failed"] for each in figures if "checkpoint/local_failed" in each] == [1.0]
    newest = 1 if policy == "stop" else 3
    for rank in (0, 1):
        assert [each.name for each in (run_root(spec) / f"rank-{rank}").iterdir()] == [f"step-{newest}"]
    assert ranks.run(2, checkpointer_ranks.find_and_load, [spec])[1] == [(newest, f"source at {newest}".encode(), [])]


@pytest.mark.parametrize(("stage", "rank"), [("part_of", 1), ("entry_of", 0), ("complete", 1), ("write_note", 0)])
def test_c5_an_unexpected_error_on_one_rank_is_told_to_all(ranks, tmp_path, made, stage, rank):
    """Injected: a RuntimeError on one rank alone in each stage of the save of step 2."""
    spec = local_spec(tmp_path, made[0] / "model", checkpoint={"every_steps": 9, "on_failure": "stop"})
    for _, error in ranks.run(2, checkpointer_ranks.run_with_local_fault, spec, stage, rank, deadline_s=60):
        assert "the local checkpoint of step 2 failed (1 so far; step 1 is the newest)" in error
        assert f"rank {rank}: " in error
        assert f"RuntimeError: injected into {stage}" in error
    assert ranks.run(2, checkpointer_ranks.find_and_load, [spec])[0] == [(1, b"source at 1", [])]


def test_a_run_that_is_over_leaves_nothing_on_the_nodes(ranks, tmp_path, made):
    spec = local_spec(tmp_path, made[0] / "model")
    (spec.checkpoint.local_dir / "of-another-run").mkdir(parents=True)
    ranks.run(2, checkpointer_ranks.run_to_its_end, spec)
    assert [each.name for each in spec.checkpoint.local_dir.iterdir()] == ["of-another-run"]


def test_of_the_same_step_the_local_one_comes_first():
    assert local.in_order([20, 10], [(25, "b"), (20, "a")]) == [(25, "b"), (20, "a"), (20, None), (10, None)]
    assert local.in_order([], []) == []


def test_of_each_save_it_is_known_who_has_whose_part():
    offers = [Offers((Offer(5, "a", (0, 1)), Offer(4, "x", (0,)))), Offers((Offer(5, "a", (1,)), Offer(5, "b", (1,))))]
    assert local.saves(offers) == [(5, "b"), (5, "a"), (4, "x")]
    assert [local.holders(offers, step, save) for step, save in local.saves(offers)] == [
        {0: [], 1: [1]},
        {0: [0], 1: [0, 1]},
        {0: [0], 1: []},
    ]


def test_a_start_removes_what_earlier_starts_of_its_run_directory_left_and_nothing_of_another(tmp_path):
    """Injected: another run of the same name on the same disk."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    before, now, other = (local.new_run("same.name", Place.of(tmp_path / each)) for each in ("one", "one", "two"))
    assert len({before, now, other}) == 3
    for name in (before, now, other, "same.name", "data"):
        local.rank_root(tmp_path / "disk", name, 0).mkdir(parents=True)
    local.remove_strangers(tmp_path / "disk", now)
    assert {each.name for each in (tmp_path / "disk").iterdir()} == {now, other, "same.name", "data"}


def test_a_note_is_read_back_and_one_that_cannot_be_read_is_none(tmp_path):
    assert local.read_note(tmp_path) is None
    assert local.newest_checkpoint(tmp_path) is None
    local.write_note(tmp_path, Note("run", "/disk", Place("/run", 1), 7))
    assert local.read_note(tmp_path) == Note("run", "/disk", Place("/run", 1), 7)
    (tmp_path / "step-6").mkdir()
    assert local.newest_checkpoint(tmp_path) == 7
    assert local.unusable_names(tmp_path) == []
    (tmp_path / local.NOTE).write_text("{")
    assert local.newest_checkpoint(tmp_path) == 6
    assert local.unusable_names(tmp_path) == [local.NOTE]
