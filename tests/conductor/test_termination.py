"""What SIGTERM asks of a run."""

import signal
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from slimerl.conductor.roles import RoleCommand, Roles
from slimerl.conductor.run import _run_until_done
from slimerl.conductor.termination import Terminated, TerminationRequest, WhileRolesEnd
from slimerl.spec.load import spec_from_tree
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, STOP_FILE


def spec_of(directory, every_steps):
    tree = {
        "name": "ends",
        "output_dir": str(directory),
        "model": {"path": "model"},
        "data": {"train_path": "rows.jsonl"},
        "training": {"steps": 1, "prompts_per_step": 1},
        "checkpoint": {"every_steps": every_steps},
    }
    return spec_from_tree(tree, "test")


def arrive(request):
    request.arrive(15, None)


def test_the_first_signal_asks_the_trainer_to_save_and_the_second_ends_the_run(tmp_path):
    request = TerminationRequest(spec_of(tmp_path, every_steps=5))
    request.check()
    assert not request.made
    arrive(request)
    request.check()
    assert request.made
    assert (tmp_path / STOP_FILE).exists()
    with pytest.raises(Terminated):
        arrive(request)


def test_a_run_that_keeps_no_checkpoints_ends_at_once(tmp_path):
    request = TerminationRequest(spec_of(tmp_path, every_steps=0))
    with pytest.raises(Terminated, match="needs --fresh"):
        arrive(request)
    assert not (tmp_path / STOP_FILE).exists()


def test_the_newest_checkpoint_is_named(tmp_path):
    for step in (20, 100):
        (tmp_path / CHECKPOINTS_DIR / f"step-{step}").mkdir(parents=True)
    request = TerminationRequest(spec_of(tmp_path, every_steps=5))
    assert str(request.terminated("rank 3 is gone")) == "started again, it goes on after step 100; rank 3 is gone"


@pytest.mark.parametrize(("sent", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_cuts_nothing_short_while_roles_end_and_the_run_does_not_start_over(tmp_path, sent, raised):
    handlers = signal.getsignal(signal.SIGTERM), signal.default_int_handler
    ending, ended = WhileRolesEnd(spec_of(tmp_path, every_steps=5)), []
    with ending:
        signal.raise_signal(sent)
        ended.append("roles")
    assert ended == ["roles"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    with pytest.raises(raised):
        ending.obey()


def test_where_no_signal_came_the_run_may_start_over(tmp_path):
    ending = WhileRolesEnd(spec_of(tmp_path, every_steps=5))
    with ending:
        pass
    ending.obey()


TRAINER = """
import os, pathlib, signal, sys
run_dir = pathlib.Path(sys.argv[1])
begun, stop = run_dir / "begun", run_dir / "stop"
if begun.exists():
    sys.exit(0 if stop.exists() else "it is not asked to stop any more")
begun.touch()
if sys.argv[2] == "slimerl stop":
    stop.touch()
else:
    os.kill(os.getppid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("asked_by", "ends"), [("slimerl stop", nullcontext()), ("SIGUSR1", pytest.raises(Terminated))]
)
def test_a_run_that_starts_over_is_still_asked_to_stop(tmp_path, asked_by, ends):
    """Injected: the trainer is killed before it has answered. The next one ends well only if it is asked, too."""

    class OneRole(Roles):
        def all(self):
            command = [sys.executable, "-c", TRAINER, str(self.spec.run_dir), asked_by]
            return [RoleCommand("trainer", command, leads=True)]

    spec = spec_of(tmp_path, every_steps=5)
    (tmp_path / "logs").mkdir()
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    try:
        with ends:
            _run_until_done(spec, OneRole(spec, tmp_path / "spec.yaml"), tmp_path, Console(quiet=True))
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
        signal.signal(signal.SIGUSR1, handlers[1])
    assert "killed by SIGKILL; the run goes on" in (tmp_path / "events.jsonl").read_text()


def test_a_request_that_the_trainer_took_and_could_not_answer_is_made_again(tmp_path):
    """Injected: its checkpoint failed."""
    request = TerminationRequest(spec_of(tmp_path, every_steps=5))
    request.repeat()
    assert not (tmp_path / STOP_FILE).exists(), "nobody has asked"
    (tmp_path / STOP_FILE).touch()
    request.notice()
    (tmp_path / STOP_FILE).unlink()
    request.notice()
    request.repeat()
    assert (tmp_path / STOP_FILE).exists()
