"""When the rollout role is started again beside trainer and engines that go on, and when the run starts over."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny_run import write_spec

from slimerl.conductor.restarts import RunRestarts
from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.rollout_restarts import RolloutRestarts
from slimerl.conductor.supervise import RoleFailed, RoleProcess, end_all
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.failure_kinds import FailureKind
from slimerl.rollout.journal_file import JOURNAL_DIR, TAKE_OVER
from slimerl.samples.messages import ADDRESS_FILE
from slimerl.spec import load_spec
from slimerl.telemetry import read_records

SLEEP = "import time; time.sleep(60)"


@dataclass
class Conductor:
    """Looks after a rollout role, an engine and a trainer, which sleep."""

    directory: Path
    sections: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = load_spec(write_spec(self.directory, **self.sections))
        self.run_dir, self.said = self.spec.run_dir, list[str]()
        (self.run_dir / JOURNAL_DIR).mkdir(parents=True)
        (self.run_dir / JOURNAL_DIR / "00000001.segment").touch()
        (self.run_dir / ADDRESS_FILE).touch()
        self.records(1)
        self.restarts = RolloutRestarts(self.spec, self.said.append)
        commands = [
            RoleCommand("rollout", [sys.executable, "-c", SLEEP], dict(os.environ)),
            RoleCommand("engine-0", [sys.executable, "-c", SLEEP], dict(os.environ), engine_id="engine-0"),
            RoleCommand("trainer", [sys.executable, "-c", SLEEP], dict(os.environ), leads=True),
        ]
        self.roles = [RoleProcess(command, self.directory) for command in commands]

    def records(self, steps: int) -> None:
        lines = [json.dumps({"step": step, "time": 0.0}) + "\n" for step in range(steps + 1)]
        (self.run_dir / "metrics.jsonl").write_text("".join(lines))

    def kill(self, number: int = 0, signal_number: int = signal.SIGKILL) -> None:
        os.kill(self.roles[number].pid, signal_number)
        Deadline("it to end", 20).wait_until(lambda: self.roles[number].exit_code is not None)

    def look(self) -> None:
        self.restarts.replace_ended(self.roles)


@pytest.fixture
def conductor(tmp_path) -> Iterator:
    made: list[Conductor] = []

    def make(**sections: dict) -> Conductor:
        made.append(Conductor(tmp_path, sections))
        return made[-1]

    yield make
    for one in made:
        end_all(one.roles, 0.0)


def test_a5_a_killed_rollout_role_is_started_again_to_take_over_and_the_others_go_on(conductor):
    one = conductor()
    pids = [role.pid for role in one.roles]
    one.look()
    assert [role.pid for role in one.roles] == pids
    one.kill()
    one.look()
    assert [role.pid for role in one.roles][1:] == pids[1:]
    assert one.roles[0].pid != pids[0]
    assert one.roles[0].exit_code is None
    assert one.roles[0].role.command[-1] == TAKE_OVER
    assert not (one.run_dir / ADDRESS_FILE).exists(), "nobody calls the one that is gone"
    assert one.said == ["rollout was killed by SIGKILL; started again in place, from its journal (1 of 3)"]
    events = [event for event in read_records(one.run_dir / "events.jsonl") if event["name"] == "restarted"]
    assert [event["text"] for event in events] == one.said


def test_it_is_started_again_as_often_as_allowed_and_always_to_take_over_once(conductor):
    one = conductor(resilience={"rollout_restarts": 2})
    for step in (1, 2):
        one.records(step)
        one.kill()
        one.look()
        assert one.roles[0].role.command.count(TAKE_OVER) == 1
    one.records(3)
    one.kill()
    with pytest.raises(RoleFailed, match=r"SIGKILL \(not started again in place: it was started again 2 of 2 times\)"):
        one.look()


def test_one_that_ends_again_before_another_step_makes_the_run_start_over_by_the_first_failure(conductor):
    """Injected: ended while it takes over, and no step is recorded between the two."""
    one = conductor()
    one.records(0)
    one.kill()
    one.look()
    one.kill(signal_number=signal.SIGTERM)
    with pytest.raises(RoleFailed) as caught:
        one.look()
    failure = one.restarts.explained(caught.value)
    assert "not started again in place: it ended again before the samples of another step were taken" in str(failure)
    assert RunRestarts(one.spec, one.said.append).start_over(failure) is True
    assert "(after rollout was killed by SIGKILL); the run goes on from its beginning" in one.said[-1]


def test_an_error_of_the_trainers_before_another_step_counts_as_failed_with_it(conductor):
    """Injected: at a step at which an error of its own would end the run."""
    one = conductor()
    one.records(0)
    one.kill()
    one.look()

    def told() -> RoleFailed:
        return one.restarts.explained(RoleFailed("trainer", 1, one.roles[0].log_path))

    assert told().kind is FailureKind.INFRASTRUCTURE
    assert told().summary == "trainer ended early with exit code 1 (after rollout was killed by SIGKILL)"
    one.records(1)
    assert told().kind is FailureKind.PROGRAM
    assert told().summary == "trainer ended early with exit code 1"


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"resilience": {"rollout_restarts": 0}}, "it was started again 0 of 0 times"),
        ({"cluster": {"placement": "colocated", "turns": "always"}}, "hand memory over in its holds"),
        ({}, "it has left no journal"),
    ],
)
def test_what_cannot_be_taken_over_makes_the_run_start_over_and_says_why(conductor, sections, reason):
    """Injected: beside the spec, a journal that was given up."""
    one = conductor(**sections)
    if not sections:
        (one.run_dir / JOURNAL_DIR / "00000001.segment").unlink()
    one.kill()
    with pytest.raises(RoleFailed, match=f"rollout was killed by SIGKILL \\(not started again in place: .*{reason}"):
        one.look()
    assert one.said == []


def test_nothing_is_started_again_where_the_trainer_has_ended_too(conductor):
    one = conductor()
    one.kill(0)
    one.kill(2)
    pid = one.roles[0].pid
    one.look()
    assert one.roles[0].pid == pid
    assert one.said == []


SEVERAL = {"rollout": {"processes": 2}, "engine": {"replicas": 2}}


def with_two_processes(one: Conductor) -> None:
    """The second stands behind the first; both have journals of their own."""
    one.roles.insert(1, RoleProcess(RoleCommand("rollout-1", [sys.executable, "-c", SLEEP]), one.directory))
    for name in ("process-0", "process-1", "ledger"):
        (one.run_dir / JOURNAL_DIR / name).mkdir()
        (one.run_dir / JOURNAL_DIR / name / "00000001.segment").touch()
    (one.run_dir / "rollout-1.json").touch()


def test_a5_of_several_rollout_processes_each_is_started_again_by_itself(conductor):
    """Injected: both are killed before another step, and one of them once more."""
    one = conductor(**SEVERAL)
    with_two_processes(one)
    pids = [role.pid for role in one.roles]
    one.kill(1)
    one.look()
    assert [role.pid for role in one.roles][2:] == pids[2:]
    assert one.roles[0].pid == pids[0]
    assert one.roles[1].role.command[-1] == TAKE_OVER
    assert not (one.run_dir / "rollout-1.json").exists()
    assert (one.run_dir / ADDRESS_FILE).exists()
    one.kill(0)
    one.look()
    assert one.roles[0].role.command[-1] == TAKE_OVER
    assert [text.partition(";")[0] for text in one.said] == [
        "rollout-1 was killed by SIGKILL",
        "rollout was killed by SIGKILL",
    ]
    one.kill(1)
    with pytest.raises(RoleFailed, match=r"rollout-1 was killed .*it ended again before the samples of another step"):
        one.look()


@pytest.mark.parametrize(("lost", "killed"), [("process-1", 1), ("process-0", 0), ("ledger", 0)])
def test_a_process_without_its_journal_or_its_ledger_makes_the_run_start_over(conductor, lost, killed):
    one = conductor(**SEVERAL)
    with_two_processes(one)
    (one.run_dir / JOURNAL_DIR / lost / "00000001.segment").unlink()
    one.kill(killed)
    with pytest.raises(RoleFailed, match="not started again in place: it has left no journal"):
        one.look()
