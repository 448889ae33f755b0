"""A role that runs but stands still shows where it stands, is killed, and is started again: real processes."""

import os
import signal
import sys

import psutil
import pytest
from tiny_run import write_spec

from slimerl.conductor.restarts import RunRestarts
from slimerl.conductor.roles import RoleCommand
from slimerl.conductor.stalls import Stalls
from slimerl.conductor.supervise import RoleProcess, end_all
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.heartbeat import HEARTBEATS_DIR, read_pulses
from slimerl.spec import load_spec

ALIVE_S, LOOK_S = 1.5, 0.1
ROLE = """
import pathlib, subprocess, sys, threading, time
from slimerl.resilience import heartbeat

def stand_here():
    time.sleep(60)

def stand_there():
    time.sleep(60)

threading.Thread(target=stand_there, daemon=True).start()
here = pathlib.Path(sys.argv[1])
heartbeat.start(here, "side", {"train": 0.5}, 60.0)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start(code):
        command = [sys.executable, "-c", ROLE + code, str(tmp_path)]
        role = RoleProcess(RoleCommand("side", command, dict(os.environ)), tmp_path)
        started.append(role)
        # a process is the role's own once it has become its command
        Deadline("the role to live", 30).wait_until(lambda: [one.pid for one in read_pulses(tmp_path)] == [role.pid])
        return role

    yield start
    end_all(started, grace_s=0.1)


def look_until_ended(tmp_path, role) -> str:
    """How the role's end is told."""
    stalls = Stalls(tmp_path, ALIVE_S, LOOK_S)
    deadline = Deadline("the role to be found standing still", 30)
    while role.exit_code is None:
        stalls.end_stalled([role])
        deadline.check()
    return role.failure().summary


def test_a3_a_process_that_is_stopped_wakes_up_to_show_its_stacks_is_killed_and_the_run_starts_over(tmp_path, start):
    """Injected: SIGSTOP."""
    role = start("stand_here()")
    os.kill(role.pid, signal.SIGSTOP)
    told = look_until_ended(tmp_path, role)
    assert told.startswith(f"side stood still: process {role.pid} was stopped by a signal")
    log = role.log_path.read_text()
    assert f"threads of process {role.pid}:" in log
    assert "in stand_here" in log
    assert "in stand_there" in log, "all threads"

    spec = load_spec(write_spec(tmp_path / "home"))
    spec.run_dir.mkdir()
    said = []
    assert RunRestarts(spec, said.append).start_over(role.failure()) is True
    assert said[0].startswith("side stood still: ")
    assert said[0].endswith("the run goes on from its beginning, for it has no checkpoint yet (1 of 3)")


def test_a3_a_process_that_lives_but_does_not_get_on_is_told_by_what_it_was_doing(tmp_path, start):
    """Injected: a phase that lasts, in a process whose other threads run."""
    role = start("heartbeat.enter('train'); stand_here()")
    told = look_until_ended(tmp_path, role)
    assert told.startswith(f"side stood still: side (process {role.pid}) does not get on in 'train'")
    assert "in stand_here" in role.log_path.read_text()


def test_a3_an_interpreter_that_does_not_turn_gives_no_sign_of_life(tmp_path, start):
    """Injected: native code that waits and never lets another thread run."""
    role = start("import ctypes; ctypes.PyDLL(None).sleep(60)")
    told = look_until_ended(tmp_path, role)
    assert told.startswith(f"side stood still: side (process {role.pid}) gave no sign of life in 'start'")
    assert "<module>" in role.log_path.read_text()


def test_a3_a_child_that_is_stopped_ends_its_role_which_leaves_nothing(tmp_path, start):
    """Injected: SIGSTOP of a process that has no heartbeat, and no handler for the signal that asks for stacks."""
    role = start("child = subprocess.Popen(['sleep', '60']); heartbeat.enter('watch'); stand_here()")
    Deadline("the child", 30).wait_until(lambda: len(role.processes()) == 2)
    child = role.processes()[1]
    child.suspend()
    assert f"process {child.pid} was stopped by a signal" in look_until_ended(tmp_path, role)
    assert f"threads of process {child.pid}" not in role.log_path.read_text()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_role_that_gets_on_is_left_alone_and_so_is_one_whose_heartbeat_was_closed(tmp_path, start):
    busy = (
        "heartbeat.enter('train')\nwhile not (here / 'close').exists():\n    time.sleep(0.05)\n    heartbeat.beat()\n"
    )
    role = start(busy + "heartbeat.stop()\n(here / 'closed').touch()\nstand_here()")
    stalls = Stalls(tmp_path, ALIVE_S, LOOK_S)

    def look(seconds):
        until = Deadline("the time of looking to be over", seconds)
        while until.remaining_s:
            stalls.end_stalled([role])
        return role.exit_code

    assert look(1.5 * ALIVE_S) is None
    (tmp_path / "close").touch()
    Deadline("the heartbeat to be closed", 30).wait_until((tmp_path / "closed").exists)
    assert list((tmp_path / HEARTBEATS_DIR).iterdir()) == []
    assert look(1.0) is None
