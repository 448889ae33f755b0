"""A step of a job is told of as a process of this machine is. A shell ends as srun would."""

import os

import pytest

from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.step import StepProcess, start_role
from slimerl.conductor.supervise import end_all
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.failure_kinds import FailureKind
from slimerl.resilience.heartbeat import HEARTBEATS_DIR


@pytest.fixture
def step(tmp_path):
    (tmp_path / "logs").mkdir()
    started = []

    def start(script: str) -> StepProcess:
        role = start_role(RoleCommand("engine-1", ["bash", "-c", script], dict(os.environ), job="7"), tmp_path / "logs")
        assert isinstance(role, StepProcess)
        started.append(role)
        return role

    yield start
    end_all(started, 0.1)


@pytest.mark.parametrize(
    ("code", "told", "kind"),
    [
        (137, "engine-1 was killed by SIGKILL", FailureKind.INFRASTRUCTURE),
        (2, "engine-1 ended early with exit code 2", FailureKind.DATA),
        (1, "engine-1 ended early with exit code 1", FailureKind.PROGRAM),
        (255, "engine-1 ended early with exit code 255", FailureKind.PROGRAM),
    ],
)
def test_how_a_task_on_another_node_ended_is_what_srun_ends_with(step, code, told, kind):
    role = step(f"exit {code}")
    Deadline("the step to end", 20).wait_until(lambda: role.exit_code is not None)
    failure = role.failure()
    assert (failure.summary, failure.kind) == (told, kind)


def test_of_several_tasks_the_one_that_ended_first_is_named(step):
    """The others were ended for it, which srun's exit code is of, too."""
    said = "srun: error: node2: task 1: Exited with exit code 1\nsrun: error: node1: task 0: Terminated"
    role = step(f"echo '{said}'; exit 143")
    Deadline("the step to end", 20).wait_until(lambda: role.exit_code is not None)
    assert role.failure().summary == "engine-1 was killed by SIGTERM (node2: task 1: Exited with exit code 1)"


def test_the_heartbeat_of_the_step_before_is_not_taken_for_that_of_the_next(step, tmp_path):
    (tmp_path / HEARTBEATS_DIR).mkdir()
    for name in ("engine-1", "engine-1@1", "engine-10"):
        (tmp_path / HEARTBEATS_DIR / name).touch()
    step("sleep 60")
    assert [path.name for path in (tmp_path / HEARTBEATS_DIR).iterdir()] == ["engine-10"]


def test_a_step_that_slurm_knows_nothing_of_yet_ends_with_its_srun(step):
    role = step("exec sleep 60")
    role.end(grace_s=20.0)
    assert role.exit_code == -15
