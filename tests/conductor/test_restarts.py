"""When a run starts over, and from where; when it does not, the reason stands beside the failure."""

import contextlib
import json
import subprocess
import sys

import pytest
from tiny_run import write_spec

from slimerl.conductor.restarts import RunRestarts
from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.supervise import RoleFailed, RoleProcess
from slimerl.resilience.deadline import Deadline
from slimerl.spec import load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import RESTARTED


@pytest.fixture
def failed(tmp_path):
    """Gives the failure of a role whose process ran that code."""

    def run(code: str) -> RoleFailed:
        role = RoleProcess(RoleCommand("trainer", [sys.executable, "-c", code]), tmp_path)
        Deadline("the role to end", 20).wait_until(lambda: role.exit_code is not None)
        return role.failure()

    return run


KILLED = "import os; os.kill(os.getpid(), 9)"
ERROR = "raise SystemExit(1)"


def run_of(tmp_path, steps: int = 0, checkpoint: dict | None = None, **sections):
    """A run that recorded so many steps; its spec."""
    spec = load_spec(write_spec(tmp_path, checkpoint=checkpoint or {}, **sections))
    spec.run_dir.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "time": 0.0}) + "\n" for step in range(steps + 1)] if steps else []
    (spec.run_dir / "metrics.jsonl").write_text("".join(lines))
    return spec


def test_a_killed_role_makes_the_run_start_over_and_both_is_said_and_recorded(tmp_path, failed):
    said: list[str] = []
    spec = run_of(tmp_path)
    restarts = RunRestarts(spec, said.append)
    assert restarts.start_over(failed(KILLED)) is True
    restarts.record()
    assert said == [
        "trainer was killed by SIGKILL; the run goes on from its beginning, for it has no checkpoint yet (1 of 3)"
    ]
    events = read_records(spec.run_dir / "events.jsonl")
    assert [(event["name"], event["text"]) for event in events] == [(RESTARTED, said[0])]


def test_an_error_before_the_first_step_ends_the_run(tmp_path, failed):
    with pytest.raises(RoleFailed, match="exit code 1; the run does not start over: nothing was achieved"):
        RunRestarts(run_of(tmp_path), print).start_over(failed(ERROR))


def test_an_error_that_comes_back_at_the_same_step_ends_the_run(tmp_path, failed):
    restarts = RunRestarts(run_of(tmp_path, steps=3), print)
    restarts.start_over(failed(ERROR))
    with pytest.raises(RoleFailed, match="nothing was achieved"):
        restarts.start_over(failed(ERROR))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"checkpoint": {"every_steps": 0}}, "keeps no checkpoints"),
        ({"checkpoint": {"resume": "never"}}, "checkpoint.resume: never"),
        ({"resilience": {"run_restarts": 0}}, "0 of 0 times"),
    ],
)
def test_what_stands_against_a_restart_is_told_with_the_failure(tmp_path, failed, sections, reason):
    spec = run_of(tmp_path, steps=3, **sections)
    with pytest.raises(RoleFailed, match=f"killed by SIGKILL; the run does not start over: .*{reason}"):
        RunRestarts(spec, print).start_over(failed(KILLED))


def test_the_kind_is_that_of_this_start_and_not_of_an_earlier_one_in_the_same_log(tmp_path):
    (tmp_path / "trainer.log").write_text("Root Cause (first observed failure):\n  exitcode  : 2 (pid: 1)\n")
    role = RoleProcess(RoleCommand("trainer", [sys.executable, "-c", ERROR]), tmp_path)
    Deadline("the role to end", 20).wait_until(lambda: role.exit_code is not None)
    assert role.failure().kind == "program"


def test_a_run_whose_disk_is_full_is_not_started_again_and_says_so(tmp_path, failed):
    """Injected: a disk of two MiB, filled to the last byte."""
    directory = tmp_path / "run"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        spec = run_of(tmp_path, steps=3)
        with (directory / "logs").open("wb") as log, contextlib.suppress(OSError):
            log.write(bytes(2**22))
        with pytest.raises(RoleFailed, match=r"does not start over: the disk of .*run is full \(\d+ bytes free\)"):
            RunRestarts(spec, print).start_over(failed(KILLED))
    finally:
        subprocess.run(["umount", str(directory)], check=True)
