"""A run whose processes and checkpoints are struck one after the other ends as if nothing had happened."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import chaos
import psutil
import pytest
from chaos import NoSuchKind, NotOurs, Survived, chosen_of, compared, emptied, order_of, read_survived, steps_of, struck
from chaos_disk import disk_of_checkpoints, fill, give_back, refusal, unmount
from chaos_faults import NEEDS_DISK, Fired
from tiny_run import teach_digits, write_spec

from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.telemetry.run_log import EVENTS_FILE, RESTARTED, read_records

KILLS = ("engine's scheduler killed", "rollout role killed", "checkpoint truncated")
FROM_WITHIN = ("connection dropped", "answer delayed", "gradient no number")
STEPS_PER_FAULT = 6


def quick_spec(directory: Path, steps: int) -> Path:
    spec = write_spec(
        directory,
        training={"steps": steps, "optimizer": {"lr": 1e-3}},
        rollout={"samples_per_prompt": 8, "max_new_tokens": 6},
        checkpoint={"every_steps": 2},
    )
    teach_digits(directory / "base")
    return spec


def undisturbed(spec: Path, directory: Path) -> Path:
    """The directory of a run without faults."""
    calm = directory / "calm"
    command = [sys.executable, "-m", "slimerl.cli", "run", str(spec), f"output_dir={calm}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return calm


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a5_faults_of_every_role_change_neither_losses_nor_weights_and_leave_nothing(tmp_path):
    """Injected, at seeded moments: kills of a scheduler, of the rollout role (`struck` sees engines and trainer live
    through it), and of a trainer rank after the newest checkpoint was truncated; an answer that is lost, one that comes
    late, and a gradient that is no number."""
    kinds = (*KILLS, *FROM_WITHIN)
    steps = len(kinds) * STEPS_PER_FAULT
    spec = quick_spec(tmp_path, steps)
    calm = undisturbed(spec, tmp_path)
    survived, problems = struck(spec, [], order_of(kinds, len(kinds), 5), 5, tmp_path)
    assert problems + compared(calm, tmp_path / "fire", steps) == []
    assert {one.kind for one in survived} == set(kinds)
    restarts = [one["text"] for one in read_records(tmp_path / "fire" / EVENTS_FILE) if one.get("name") == RESTARTED]
    in_place = f"rollout was killed by SIGKILL; started again in place, from its journal (1 of {len(kinds) + 1})"
    assert in_place in restarts
    of_trainer = [text for text in restarts if "trainer ended early with exit code 1; the run goes on after" in text]
    assert len(of_trainer) == 2, "a rank was killed, and a gradient that is no number ends all of them"
    assert len(restarts) == len(KILLS) + 1, f"of the faults from within that one alone ends a role: {restarts}"


class Stepping(Fired):
    """A run that is a step further every fifth time that it is looked at, up to `last`; there it ends, or stays."""

    def __init__(self, last: int, ends: bool) -> None:
        super().__init__([], Path())
        self.last, self.ends, self.looks = last, ends, 0

    @property
    def newest_step(self) -> int:
        self.looks += 1
        return min(self.looks // 5, self.last)

    def ended(self) -> int | None:
        return 0 if self.ends and self.looks // 5 > self.last else None

    def tree(self) -> list[psutil.Process]:
        return []


def test_after_the_last_fault_a_run_has_as_long_as_its_steps_take(monkeypatch):
    """Injected: many steps are left, or the run stands still at one of them."""
    monkeypatch.setattr(chaos, "START_S", 1.0)
    begun = time.monotonic()
    chaos._to_the_end(Stepping(last=6, ends=True))
    assert time.monotonic() - begun > chaos.START_S
    with pytest.raises(DeadlineExceeded, match="a step after 2, or the end of the run"):
        chaos._to_the_end(Stepping(last=2, ends=False))


def test_a_kind_that_cannot_be_had_is_left_out_by_name_unless_it_was_asked_for():
    """Injected: this process may not mount."""
    every, said = chosen_of("", "permission denied")
    assert set(chaos.KINDS) - set(every) == {NEEDS_DISK}
    assert said == "left out: 'disk full', for nothing can be mounted: permission denied"
    assert chosen_of("answer delayed, disk full", "") == (["answer delayed", "disk full"], "")
    assert chosen_of("answer delayed", "permission denied") == (["answer delayed"], "")
    with pytest.raises(NoSuchKind, match=r"'disk full' cannot be had, .*: permission denied; run it as root"):
        chosen_of("answer delayed,disk full", "permission denied")
    with pytest.raises(NoSuchKind, match="unknown kinds: fire"):
        chosen_of("fire", "")


@pytest.fixture
def run_dir(tmp_path):
    if reason := refusal(tmp_path):
        pytest.skip(reason)
    assert list(tmp_path.iterdir()) == []
    yield tmp_path / "fire"
    unmount(tmp_path / "fire" / "checkpoints")


def test_what_is_on_the_disk_of_checkpoints_lies_in_its_place_at_the_end_whatever_happens(run_dir):
    """Injected: the disk is full, and what goes on there fails; a checkpoint lay there before."""
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step-2").mkdir(parents=True)
    (checkpoints / "step-2" / "weights").write_bytes(b"2" * 5000)

    def used() -> None:
        with disk_of_checkpoints(run_dir):
            assert checkpoints.is_mount()
            assert (checkpoints / "step-2" / "weights").read_bytes() == b"2" * 5000
            fill(checkpoints)
            give_back(checkpoints)
            (checkpoints / "step-4").write_bytes(b"4" * 5000)
            fill(checkpoints)
            (checkpoints / "step-6").write_bytes(b"6" * 5000)

    with pytest.raises(OSError, match="No space left"):
        used()
    assert not checkpoints.is_mount()
    assert (checkpoints / "step-2" / "weights").read_bytes() == b"2" * 5000
    assert (checkpoints / "step-4").read_bytes() == b"4" * 5000
    assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints", "lock"]


def killed_with_the_disk(run_dir: Path) -> None:
    """A call that ends so leaves it mounted."""
    code = (
        "import os, sys, pathlib, chaos_disk; disk = chaos_disk.disk_of_checkpoints(pathlib.Path(sys.argv[1]));"
        "disk.__enter__(); os.kill(os.getpid(), 9)"
    )
    tools = Path(chaos.__file__).parent
    assert subprocess.run([sys.executable, "-c", code, run_dir], cwd=tools, timeout=60).returncode == -signal.SIGKILL
    assert (run_dir / "checkpoints").is_mount()


def test_a_disk_that_a_killed_call_has_left_is_taken_up_or_away(run_dir):
    """Injected: the call was killed with the disk mounted, or while it brought what was there before."""
    checkpoints = run_dir / "checkpoints"
    killed_with_the_disk(run_dir)
    (checkpoints / "step-2").touch()
    with disk_of_checkpoints(run_dir):
        assert (checkpoints / "step-2").exists()
    assert (checkpoints / "step-2").exists()

    killed_with_the_disk(run_dir)
    (checkpoints / "step-2").unlink()
    (run_dir / "checkpoints.kept").mkdir()
    (run_dir / "checkpoints.kept" / "step-2").touch()
    with disk_of_checkpoints(run_dir):
        assert (checkpoints / "step-2").exists()

    killed_with_the_disk(run_dir)
    emptied(run_dir.parent)
    assert list(run_dir.parent.iterdir()) == []


def test_a_directory_of_someone_else_is_not_emptied(tmp_path):
    """Injected: --out names a directory that holds other work, or leads there."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "calm").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    for out, told in ((tmp_path, "holds link, thesis, which"), (tmp_path / "link", "is no directory")):
        with pytest.raises(NotOurs, match=told):
            emptied(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm", "link", "thesis"]


def test_what_an_earlier_call_left_is_replaced(tmp_path):
    out = tmp_path / "chaos"
    (out / "fire" / "logs").mkdir(parents=True)
    (out / "faults.jsonl").write_text("{}")
    emptied(out)
    assert list(out.iterdir()) == []


def test_a_call_that_is_resumed_knows_what_was_survived(tmp_path):
    """Injected: it was killed while it wrote the third line."""
    two = [Survived(number, "rollout role killed", 7 * number, 4.5, 60.0) for number in range(2)]
    lines = [json.dumps(vars(one)) for one in two]
    (tmp_path / "faults.jsonl").write_text("\n".join([*lines, lines[0][:20]]))
    assert read_survived(tmp_path / "faults.jsonl") == two
    assert read_survived(tmp_path / "none.jsonl") == []
    kinds = ["a", "b", "c"]
    assert order_of(kinds, 7, 3) == order_of(kinds, 7, 3) != order_of(kinds, 7, 4)
    assert sorted(order_of(kinds, 7, 3)) == ["a", "a", "a", "b", "b", "c", "c"]


def test_an_evaluation_in_the_background_is_no_second_record_of_its_step():
    def record(step, *names):
        return {"step": step, "time": 0.0} | dict.fromkeys(names, 1.0)

    steps = [record(0, "sync/total_s"), record(1, "train/loss"), record(2, "train/loss")]
    assert steps_of([steps[0], record(0, "eval/accuracy"), *steps[1:], record(1, "eval/accuracy")]) == [0, 1, 2]
    assert steps_of([*steps, steps[1]]) == [0, 1, 2, 1]
    assert steps_of([record(0, "eval/accuracy"), *steps[1:]]) == [0, 1, 2], "it may be all that a step has"
