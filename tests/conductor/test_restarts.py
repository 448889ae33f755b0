"""When a run starts over, and from where; when it does not, the reason stands beside the failure."""

import contextlib
import json
import subprocess
import sys

import pytest
from tiny_run import write_spec

from slimerl.conductor.restarts import EngineRestarts, RunRestarts
from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.supervise import RoleFailed, RoleProcess, end_all
from slimerl.resilience.deadline import Deadline
from slimerl.spec import load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import RESIZED, RESTARTED
from slimerl.training.checkpoint import local
from slimerl.training.checkpoint.local import Note, Place


@pytest.fixture
def failed(tmp_path):
    """Gives the failure of a role whose process ran that code."""

    def run(code: str) -> RoleFailed:
        role = RoleProcess(RoleCommand("trainer", [sys.executable, "-c", code]), tmp_path)
        Deadline("the role to end", 20).wait_until(lambda: role.exit_code is not None)
        return role.failure()

    return run


EVALUATES = {"evaluation": {"every_steps": 1, "background": True, "engines": 1}}
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


def test_a_run_that_has_a_local_checkpoint_alone_goes_on_from_it(tmp_path, failed):
    said: list[str] = []
    spec = run_of(tmp_path, steps=4)
    local.write_note(spec.run_dir / "checkpoints", Note("run", "/disk", Place("/run", 1), 3))
    assert RunRestarts(spec, said.append).start_over(failed(KILLED)) is False
    assert said == ["trainer was killed by SIGKILL; the run goes on after step 3 (1 of 3)"]


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


@pytest.fixture
def engines(tmp_path):
    """Gives running roles, of which the last engine has ended with an error before it could serve: (roles, it)."""
    started: list[RoleProcess] = []

    def start(*names: str) -> list[RoleProcess]:
        for name in names:
            code = ERROR if name == names[-1] else "import time; time.sleep(60)"
            started.append(RoleProcess(RoleCommand(name, [sys.executable, "-c", code], engine_id=name), tmp_path))
        Deadline("the engine to end", 20).wait_until(lambda: started[-1].exit_code is not None)
        return list(started)

    yield start
    end_all(started, 0.1)


def test_an_engine_that_was_added_and_does_not_start_costs_the_run_nothing(tmp_path, engines):
    """Injected: it ends with an error before it serves; so would the next one in its place."""
    said: list[str] = []
    spec = run_of(tmp_path, steps=3)
    roles = engines("engine-0", "engine-1")
    EngineRestarts(spec, said.append).replace_ended(roles)
    assert [role.role.name for role in roles] == ["engine-0"]
    assert said == [
        "engine-1 ended early with exit code 1; it was added while the run went on, and is given up: nothing was "
        "achieved since it was started: the same would come again"
    ]
    events = read_records(spec.run_dir / "events.jsonl")
    assert [(event["name"], event["text"]) for event in events] == [(RESIZED, said[0])]


@pytest.mark.parametrize(
    ("names", "sections"),
    [
        (("engine-1", "engine-0"), {}),
        (("engine-0", "engine-3"), {"engine": {"replicas": 2}, "rollout": {"processes": 2}}),
        (("engine-1", "engine-2"), {"engine": {"replicas": 2}, "cluster": {"placement": "disaggregated"}} | EVALUATES),
    ],
    ids=["one that the spec names", "the last one of a rollout process", "the last one that does not evaluate alone"],
)
def test_an_engine_that_is_needed_and_does_not_start_ends_the_run(tmp_path, engines, names, sections):
    roles = engines(*names)
    with pytest.raises(RoleFailed, match=f"{names[-1]} is not started again: nothing was achieved"):
        EngineRestarts(run_of(tmp_path, **sections), print).replace_ended(roles)
    assert len(roles) == 2
