"""What a run that goes on does with the directory and the record of the one before."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor.preflight.paths import path_faults
from slimerl.conductor.run_directory import RunDirectoryTaken, claimed, clear
from slimerl.spec.load import dump_spec, spec_from_tree
from slimerl.telemetry import RunLog, read_records
from slimerl.telemetry.progress import Tail
from slimerl.telemetry.run_log import RESTARTED, RecordDamaged, append_event, is_evaluated
from slimerl.training.checkpoint import local
from slimerl.training.checkpoint.local import Note, Place


def spec_in(run_dir, **sections):
    tree = {
        "name": "recorded",
        "output_dir": str(run_dir),
        "model": {"path": "model"},
        "data": {"train_path": "rows.jsonl", "max_prompt_tokens": 16},
        "training": {"steps": 1, "prompts_per_step": 8},
    }
    for section, values in sections.items():
        tree[section] = {**tree[section], **values}
    return spec_from_tree(tree, "the test")


def record(run_dir, *steps, after_step=None, exported=False):
    with RunLog(run_dir, after_step=after_step) as log:
        for step in steps:
            log.metrics(step, {"train/loss": float(step)})
        if exported:
            with log.phase(steps[-1], "export"):
                pass


def steps_of(run_dir):
    return [each["step"] for each in read_records(run_dir / "metrics.jsonl")]


def test_c1_steps_after_the_checkpoint_are_recorded_once(tmp_path):
    """Injected: the run before recorded two steps more than the checkpoint has seen, the last one half."""
    record(tmp_path, 0, 1, 2, 3, 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tra')
    record(tmp_path, 3, 4, 5, after_step=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_it_is_known_whether_the_evaluation_of_a_step_is_recorded(tmp_path):
    record(tmp_path, 0, 1, 2)
    with RunLog(tmp_path) as log:
        log.metrics(1, {"eval/seconds": 1.0})
    assert [is_evaluated(tmp_path, step) for step in range(4)] == [False, True, False, False]


def test_c1_the_board_forgets_the_steps_that_are_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, 0, 1, 2, 3)
    record(tmp_path, 2, 3, after_step=1)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [0, 1, 2, 3]


def test_who_watches_a_record_that_is_cut_reads_the_new_one(tmp_path):
    record(tmp_path, 0, 1, 2, 3)
    tail = Tail(tmp_path / "metrics.jsonl", from_end=True)
    record(tmp_path, after_step=1)
    assert [each["step"] for each in tail.new()] == [0, 1]
    record(tmp_path, 2)
    assert [each["step"] for each in tail.new()] == [2]


ADDRESSES = ("rollout.json", "rollout-2.json", "gateway.json", "gateway-1.json")
"""Of more rollout processes than the next start has."""


def earlier_run(run_dir, exported=False, checkpoint=True):
    with claimed(spec_in(run_dir), fresh=False):
        record(run_dir, 0, 1, 2, exported=exported)
        (run_dir / "logs" / "trainer.log").write_text("before\n")
        for name in ADDRESSES:
            (run_dir / name).write_text(json.dumps({}))
        if checkpoint:
            (run_dir / "checkpoints" / "step-2").mkdir(parents=True)


def test_a_run_that_ended_early_goes_on_with_its_record_its_logs_and_its_checkpoints(tmp_path):
    earlier_run(tmp_path)
    with claimed(spec_in(tmp_path), fresh=False):
        assert steps_of(tmp_path) == [0, 1, 2]
        assert (tmp_path / "logs" / "trainer.log").read_text() == "before\n"
        assert (tmp_path / "checkpoints" / "step-2").is_dir()
        assert not any((tmp_path / name).exists() for name in ADDRESSES), "of services that are gone"


def test_a_run_with_a_local_checkpoint_alone_goes_on_and_a_fresh_start_forgets_it(tmp_path):
    earlier_run(tmp_path, checkpoint=False)
    local.write_note(tmp_path / "checkpoints", Note("run", "/disk", Place("/run", 1), 2))
    with claimed(spec_in(tmp_path), fresh=False):
        assert steps_of(tmp_path) == [0, 1, 2]
        assert local.newest_checkpoint(tmp_path / "checkpoints") == 2
    with claimed(spec_in(tmp_path), fresh=True):
        assert local.read_note(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("fresh", [False, True])
def test_c1_a_request_to_stop_the_run_before_does_not_end_the_next_one(tmp_path, fresh):
    """Injected: a request that came when the run before was past its last step."""
    earlier_run(tmp_path)
    (tmp_path / "stop").touch()
    with claimed(spec_in(tmp_path), fresh):
        assert not (tmp_path / "stop").exists()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("left", ["step-2.damaged", "a link"])
def test_c2_what_may_hold_work_is_not_removed_by_a_start(tmp_path, left, recorded):
    """Injected: the only checkpoint was set aside as damaged, or is a link to a disk that is not mounted."""
    with claimed(spec_in(tmp_path), fresh=False):
        if recorded:
            record(tmp_path, 0, 1, 2)
        (tmp_path / "checkpoints").mkdir()
        if left == "a link":
            (tmp_path / "checkpoints" / "step-2").symlink_to(tmp_path / "nowhere")
        else:
            (tmp_path / "checkpoints" / left).mkdir()
    with pytest.raises(RunDirectoryTaken, match=r"only step-2.*--fresh"), claimed(spec_in(tmp_path), fresh=False):
        pass
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_fresh_begins_anew_without_the_checkpoints_of_the_run_before(tmp_path):
    earlier_run(tmp_path)
    with claimed(spec_in(tmp_path), fresh=True):
        assert steps_of(tmp_path) == []
        assert not (tmp_path / "checkpoints").exists()
        assert not (tmp_path / "logs" / "trainer.log").exists()


@pytest.mark.parametrize(
    ("left", "said"), [({"exported": True}, "finished"), ({"checkpoint": False}, "no checkpoint")], ids=str
)
def test_a_finished_run_and_one_without_a_checkpoint_are_not_replaced_in_silence(tmp_path, left, said):
    earlier_run(tmp_path, **left)
    with pytest.raises(RunDirectoryTaken, match=f"{said}.*--fresh"), claimed(spec_in(tmp_path), fresh=False):
        pass
    assert steps_of(tmp_path) == [0, 1, 2]


def test_fresh_empties_a_directory_of_checkpoints_that_is_a_link_to_another_disk(tmp_path):
    """Injected: the user moved the checkpoints to a big disk and put a link in their place."""
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    earlier_run(run_dir)
    (run_dir / "checkpoints").rename(disk)
    (run_dir / "checkpoints").symlink_to(disk)
    with claimed(spec_in(run_dir), fresh=True):
        assert (run_dir / "checkpoints").is_symlink()
        assert list(disk.iterdir()) == []


def test_fresh_empties_a_file_system_that_is_mounted_for_the_checkpoints(tmp_path):
    earlier_run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", checkpoints], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        (checkpoints / "step-4").mkdir()
        with claimed(spec_in(tmp_path), fresh=True):
            assert checkpoints.is_mount()
            assert list(checkpoints.iterdir()) == []
    finally:
        subprocess.run(["umount", checkpoints], check=True)


def test_fresh_does_not_remove_the_checkpoint_that_the_run_starts_from(tmp_path):
    earlier_run(tmp_path)
    starts = spec_in(tmp_path, model={"megatron_path": str(tmp_path / "checkpoints" / "step-2")})
    refused = pytest.raises(RunDirectoryTaken, match=r"model.megatron_path: .*step-2 lies in .*checkpoints")
    with refused, claimed(starts, fresh=True):
        pass
    assert (tmp_path / "checkpoints" / "step-2").is_dir()


@pytest.mark.parametrize("lock", ["1234\n", None], ids=["a lock of another program", "a link"])
def test_what_lies_in_a_directory_that_no_run_has_made_stays(tmp_path, lock):
    """Injected: names that a run uses, beside a `lock` that is another program's."""
    target = tmp_path / "somewhere"
    target.write_text("theirs")
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "best.pt").write_text("theirs")
    if lock is None:
        (run_dir / "lock").symlink_to(target)
    else:
        (run_dir / "lock").write_text(lock)
    for fresh in (False, True):
        with pytest.raises(RunDirectoryTaken, match="no run's"), claimed(spec_in(run_dir), fresh=fresh):
            pass
    assert (run_dir / "checkpoints" / "best.pt").read_text() == target.read_text() == "theirs"
    assert (run_dir / "lock").read_text() == (lock or "theirs")
    assert path_faults(spec_in(run_dir))[-1].startswith(f"output_dir: {run_dir} holds files that are no run's")


def test_a_lock_that_is_no_file_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(RunDirectoryTaken, match="lock"), claimed(spec_in(tmp_path), fresh=False):
        pass


def test_who_watches_a_record_whose_last_line_is_torn_reads_what_comes_after_it(tmp_path):
    """Injected: the writer was killed, or its disk was full, in the middle of a line; the next writer cuts it off."""
    record(tmp_path, 0, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tra')
    tail = Tail(tmp_path / "metrics.jsonl", from_end=True)
    record(tmp_path, 2, 3)
    assert [each["step"] for each in tail.new()] == [2, 3]


def test_a_broken_line_within_a_record_is_named(tmp_path):
    record(tmp_path, 0, 1)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0][:9], lines[1], ""]))
    with pytest.raises(RecordDamaged, match=r"metrics.jsonl, line 1 is no record"):
        read_records(tmp_path / "metrics.jsonl")


def torn(file):
    with file.open("a") as lines:
        lines.write('{"step": 5, "pha')


def test_a_restart_is_noted_behind_a_line_that_the_writer_left_torn(tmp_path):
    """Injected: the trainer was killed, or its disk was full, in the middle of an event."""
    record(tmp_path, 0, 1, exported=True)
    torn(tmp_path / "events.jsonl")
    append_event(tmp_path, 1, "note", RESTARTED, "the trainer was killed", alone=True)
    assert [each.get("name") for each in read_records(tmp_path / "events.jsonl")] == [None, None, RESTARTED]


RUN_TOGETHER = '{"step": 1, "ti{"step": 2}'


@pytest.mark.parametrize(
    ("broken", "line"),
    [("events.jsonl", RUN_TOGETHER), ("metrics.jsonl", RUN_TOGETHER), ("metrics.jsonl", '{"time": 1.0}')],
)
def test_a_broken_record_is_told_before_roles_start(tmp_path, broken, line):
    """Injected: two lines that ran into each other; a record of no step."""
    earlier_run(tmp_path)
    with (tmp_path / broken).open("a") as lines:
        lines.write(f"{line}\n")
    (tmp_path / "spec.yaml").write_text(dump_spec(spec_in(tmp_path)))
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "spec.yaml")])
    assert result.exit_code == 2
    [said] = result.stderr.splitlines()
    assert f"{broken}, line " in said
    assert said.endswith("remove the line, or the file")


@pytest.mark.parametrize("command", [["stop"], ["engines", "add"]])
def test_a_lock_that_cannot_be_asked_is_one_line(tmp_path, command):
    (tmp_path / "lock").mkdir()
    (tmp_path / "spec.yaml").write_text(dump_spec(spec_in(tmp_path)))
    result = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{tmp_path}/lock cannot be asked whether a run holds it: ")


def test_a_file_in_the_place_of_the_run_directory_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(RunDirectoryTaken, match="run cannot be the directory of a run"),
        claimed(spec_in(tmp_path / "run"), fresh=False),
    ):
        pass


def test_a_run_that_starts_over_from_its_beginning_keeps_what_its_roles_said(tmp_path):
    earlier_run(tmp_path)
    clear(spec_in(tmp_path), goes_on=False, keeps_logs=True)
    assert steps_of(tmp_path) == []
    assert (tmp_path / "logs" / "trainer.log").read_text() == "before\n"
