"""Roles are watched and ended together: real processes that end, fail, are killed, or will not go."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.supervise import RoleFailed, RoleProcess, end_all, watch
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.tied import tied_command

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    started = []

    def start(name, code, leads=False):
        role = RoleProcess(RoleCommand(name, [sys.executable, "-c", code], dict(os.environ), leads), tmp_path)
        started.append(role)
        return role

    yield start
    end_all(started, grace_s=0.1)


def until_ended(role):
    Deadline(f"{role.role.name} to end", 20).wait_until(lambda: role.exit_code is not None)


def until_log_says(role, text):
    Deadline(f"{role.role.name} to say {text}", 20).wait_until(lambda: text in role.log_path.read_text())


def test_the_run_is_over_when_the_leading_role_ends_well(start):
    side, lead = start("side", SLEEP), start("lead", "pass", leads=True)
    until_ended(lead)
    assert watch([side, lead]) is True


def test_nothing_is_over_while_all_run(start):
    assert watch([start("side", SLEEP), start("lead", SLEEP, leads=True)]) is False


def test_a_failing_role_is_named_with_the_tail_of_its_log(start):
    lead, side = start("lead", SLEEP, leads=True), start("side", "import sys; print('why it broke'); sys.exit(3)")
    until_ended(side)
    with pytest.raises(RoleFailed, match=r"side ended early with exit code 3(.|\n)*why it broke"):
        watch([side, lead])


def test_a_killed_role_is_named_even_if_the_leading_one_failed_because_of_it(start):
    side, lead = start("side", SLEEP), start("lead", "raise SystemExit(1)", leads=True)
    os.kill(side.pid, signal.SIGKILL)
    until_ended(side)
    until_ended(lead)
    with pytest.raises(RoleFailed, match="side was killed by SIGKILL"):
        watch([side, lead])


def test_a_side_role_that_ends_well_too_early_is_a_failure(start):
    side, lead = start("side", "pass"), start("lead", SLEEP, leads=True)
    until_ended(side)
    with pytest.raises(RoleFailed, match="side ended before the run was over"):
        watch([side, lead])


def test_a5_a_role_that_ignores_sigterm_is_killed_with_its_children(start):
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    role = start("stubborn", code)
    until_log_says(role, "child")
    child = int(role.log_path.read_text().split()[-1])
    end_all([role], grace_s=0.3)
    assert role.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a5_a_role_does_not_outlive_a_conductor_that_was_killed(tmp_path):
    conductor = (
        "import pathlib, sys, time\n"
        "from slimerl.conductor.roles import RoleCommand\n"
        "from slimerl.conductor.supervise import RoleProcess\n"
        f"role = RoleProcess(RoleCommand('side', [sys.executable, '-c', {SLEEP!r}]), pathlib.Path({str(tmp_path)!r}))\n"
        "print(role.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", conductor], stdout=subprocess.PIPE, text=True)
    role_pid = int(process.stdout.readline())
    role = psutil.Process(role_pid)
    # Once it has become the role's own command, its life is tied.
    Deadline("the role to start", 20).wait_until(lambda: SLEEP in " ".join(role.cmdline()))
    process.kill()
    process.wait()
    Deadline("the role to end", 10).wait_until(lambda: not role.is_running() or role.status() == psutil.STATUS_ZOMBIE)


def test_ending_many_roles_takes_one_grace_period_not_many(start):
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
    roles = [start(f"deaf-{n}", ignore + "time.sleep(60)") for n in range(3)]
    for role in roles:
        until_log_says(role, "deaf")
    began = time.monotonic()
    end_all(roles, grace_s=1.0)
    assert time.monotonic() - began < 8.0
    assert all(role.exit_code == -signal.SIGKILL for role in roles)


def test_a5_a_child_that_starts_when_its_tied_parent_is_gone_notices_it(tmp_path):
    """Injected: torchrun is killed while a rank still imports. The rank has another parent then, which lives on."""
    told = tmp_path / "told"
    child = (
        "import os, pathlib, time\n"
        "from slimerl.resilience.processes import Orphaned, die_with_parent\n"
        "from slimerl.resilience.tied import tied_parent\n"
        "while os.getppid() == tied_parent():\n"
        "    time.sleep(0.01)\n"
        "try:\n"
        "    die_with_parent(tied_parent())\n"
        "except Orphaned:\n"
        f"    pathlib.Path({str(told)!r}).write_text('orphaned')\n"
    )
    launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    subprocess.run(tied_command([sys.executable, "-c", launcher]), check=True, timeout=60)
    Deadline("the child to notice", 60).wait_until(told.exists)


def test_what_a_rank_said_is_shown_and_not_the_account_of_its_launcher(start, tmp_path):
    """Injected: a rank that ends with a message, under the real launcher, whose account is longer than the tail."""
    rank = tmp_path / "rank.py"
    rank.write_text("print('the model has 3 heads, and 2 ranks'); raise SystemExit(2)")
    launched = f"import runpy, sys; sys.argv = ['torchrun', '--standalone', {str(rank)!r}]; "
    role = start("trainer", launched + "runpy.run_module('torch.distributed.run', run_name='__main__')", leads=True)
    until_ended(role)
    with pytest.raises(RoleFailed) as failed:
        watch([role])
    assert str(failed.value).endswith("the model has 3 heads, and 2 ranks")
    assert failed.value.kind == "data"
