"""Which failures are worth another start: killed ones are, bad input never, an error once something was achieved."""

import pytest

from slimerl.resilience.failure_kinds import FailureKind, RestartBudget, kind_of_exit

TORCHRUN = """
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 42)
"""


@pytest.mark.parametrize(
    ("code", "log", "kind"),
    [
        (-9, "", FailureKind.INFRASTRUCTURE),
        (1, TORCHRUN.format(code=-9), FailureKind.INFRASTRUCTURE),
        (143, "", FailureKind.INFRASTRUCTURE),
        (1, TORCHRUN.format(code=143), FailureKind.INFRASTRUCTURE),
        (255, "", FailureKind.PROGRAM),
        (2, "", FailureKind.DATA),
        (1, TORCHRUN.format(code=2), FailureKind.DATA),
        (1, TORCHRUN.format(code=1), FailureKind.PROGRAM),
        (1, "no account of any rank", FailureKind.PROGRAM),
        (0, "", FailureKind.PROGRAM),
    ],
)
def test_a_failure_is_of_the_kind_that_the_first_process_to_fail_shows(code, log, kind):
    assert kind_of_exit(code, log) is kind


def test_bad_input_is_never_tried_again():
    assert "input" in (RestartBudget(3).refusal(FailureKind.DATA, achieved=9.0) or "")


def test_a_killed_process_is_started_again_as_often_as_allowed():
    budget = RestartBudget(2)
    assert [budget.refusal(FailureKind.INFRASTRUCTURE, 0.0) for _ in range(2)] == [None, None]
    assert "2 of 2" in (budget.refusal(FailureKind.INFRASTRUCTURE, 5.0) or "")


def test_an_error_is_tried_again_only_after_something_was_achieved_since():
    budget = RestartBudget(9)
    assert "nothing was achieved" in (budget.refusal(FailureKind.PROGRAM, 0.0) or "")
    assert budget.refusal(FailureKind.PROGRAM, 3.0) is None
    assert "nothing was achieved" in (budget.refusal(FailureKind.PROGRAM, 3.0) or "")
    assert budget.refusal(FailureKind.PROGRAM, 4.0) is None


def test_what_stands_against_a_restart_is_told_and_not_counted():
    budget = RestartBudget(1)
    assert budget.refusal(FailureKind.INFRASTRUCTURE, 1.0, lambda: "no checkpoints") == "no checkpoints"
    assert budget.used == 0
