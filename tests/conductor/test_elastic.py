"""Engines by command: what is asked is done or refused with a reason, and whoever asks is answered."""

import os
import re
import sys
import threading
import time

import pytest
from tiny_run import write_spec
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor.elastic import REQUESTS_DIR, ElasticEngines, EngineAnswer, EngineRequest, ask
from slimerl.conductor.preflight import machine
from slimerl.conductor.roles import RoleCommand, Roles, role_commands
from slimerl.conductor.supervise import RoleProcess, end_all
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.spec import load_spec

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def conductor(tmp_path):
    """Serves requests beside roles that sleep: two engines and a trainer."""
    spec = load_spec(write_spec(tmp_path, engine={"replicas": 2}, deadlines={"shutdown_s": 2.0}))
    (spec.run_dir / "logs").mkdir(parents=True)
    roles = [
        RoleProcess(RoleCommand(name, [sys.executable, "-c", SLEEP], dict(os.environ), engine_id=engine), tmp_path)
        for name, engine in (("engine-0", "engine-0"), ("engine-1", "engine-1"), ("trainer", None))
    ]
    engines, over = ElasticEngines(Roles(spec, tmp_path / "spec.yaml"), print), threading.Event()

    def serve() -> None:
        while not over.wait(0.02):
            engines.serve(roles)

    serving = threading.Thread(target=serve)
    serving.start()
    yield spec, roles
    over.set()
    serving.join()
    end_all(roles, 0.1)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (EngineRequest(remove=["engine-7"]), "no engine engine-7 runs; there are engine-0, engine-1"),
        (EngineRequest(remove=["engine-0", "engine-1"]), "one must stay"),
    ],
)
def test_what_cannot_be_removed_is_refused_and_everything_stays(conductor, request_, why):
    spec, roles = conductor
    assert why in ask(spec.run_dir, request_, 20).refused
    assert [role.exit_code for role in roles] == [None, None, None]


@pytest.mark.parametrize(
    ("removed", "why"),
    [("engine-1", "engine-1 evaluates alone, and the run counts on it"), ("engine-0", "one must stay")],
)
def test_neither_an_engine_that_evaluates_alone_nor_the_last_of_the_rollouts_is_removed(tmp_path, removed, why):
    apart = {"engines": 1, "background": True, "every_steps": 1}
    sections = {"engine": {"replicas": 2}, "cluster": {"placement": "disaggregated"}, "evaluation": apart}
    spec = load_spec(write_spec(tmp_path, **sections))
    commands = [
        RoleCommand(name, [sys.executable, "-c", SLEEP], dict(os.environ), engine_id=name)
        for name in ("engine-0", "engine-1")
    ]
    roles = [RoleProcess(command, tmp_path) for command in commands]
    try:
        commands_of = Roles(spec, tmp_path / "spec.yaml")
        answer = ElasticEngines(commands_of, print).change(EngineRequest(remove=[removed]), roles, "by command")
        assert why in answer.refused
        assert len(roles) == 2
    finally:
        end_all(roles, 0.1)


def test_an_engine_that_is_removed_ends_and_the_others_stay(conductor):
    spec, roles = conductor
    ended = roles[0]
    assert ask(spec.run_dir, EngineRequest(remove=["engine-0"]), 20) == EngineAnswer(["engine-0"])
    assert ended.exit_code is not None
    assert [role.role.name for role in roles] == ["engine-1", "trainer"]
    assert list((spec.run_dir / REQUESTS_DIR).iterdir()) == []


def test_an_engine_that_is_named_twice_is_removed_once(conductor):
    """Injected: a slip in the command, which must not end the run."""
    spec, roles = conductor
    assert ask(spec.run_dir, EngineRequest(remove=["engine-0", "engine-0"]), 20) == EngineAnswer(["engine-0"])
    assert [role.role.name for role in roles] == ["engine-1", "trainer"]


def test_a3_several_engines_end_in_the_time_of_one(conductor):
    """Injected: engines that do not end when asked to; whoever wants them removed waits for one answer."""
    spec, roles = conductor
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + SLEEP
    for name in ("engine-2", "engine-3", "engine-4"):
        command = RoleCommand(name, [sys.executable, "-c", deaf], dict(os.environ), engine_id=name)
        roles.insert(-1, RoleProcess(command, spec.run_dir / "logs"))
    started = Deadline("the engines to ignore SIGTERM", 20)
    for role in roles[2:5]:
        started.wait_until(lambda role=role: "deaf" in role.log_path.read_text())
    begun = time.monotonic()
    names = ["engine-2", "engine-3", "engine-4"]
    assert ask(spec.run_dir, EngineRequest(remove=names), 60) == EngineAnswer(names)
    assert time.monotonic() - begun < 2 * spec.deadlines.shutdown_s


def test_an_engine_that_is_added_has_a_number_of_its_own_and_stands_before_the_trainer(conductor, monkeypatch):
    spec, roles = conductor
    # how much this machine has free just now is not what is tested here
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64 * 2**30)
    assert ask(spec.run_dir, EngineRequest(add=1), 20).engines == ["engine-2"]
    assert [role.role.name for role in roles] == ["engine-0", "engine-1", "engine-2", "trainer"]
    expected = [command for command in role_commands(spec, spec.run_dir) if command.engine_id][-1].command
    assert roles[2].role.command[:3] == expected[:3]


def test_an_engine_that_the_memory_does_not_hold_is_refused_and_not_started(conductor, monkeypatch):
    spec, roles = conductor
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 2**20)
    refused = ask(spec.run_dir, EngineRequest(add=1), 20).refused
    assert re.match(r"1 more would need about [0-9.]+ GiB of memory, 0.0 GiB are available; add fewer", refused)
    assert len(roles) == 3


def test_where_engines_take_turns_with_the_trainer_none_is_added(tmp_path, monkeypatch):
    """Injected: turns without CUDA, too; an engine that wants a sync in the trainer's turn would end the run."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64 * 2**30)
    spec = load_spec(write_spec(tmp_path, cluster={"placement": "colocated", "turns": "always"}))
    engine = RoleCommand("engine-0", [sys.executable, "-c", SLEEP], dict(os.environ), engine_id="engine-0")
    roles = [RoleProcess(engine, tmp_path)]
    try:
        answer = ElasticEngines(Roles(spec, tmp_path / "spec.yaml"), print).change(
            EngineRequest(add=1), roles, "by command"
        )
        assert answer.engines == []
        assert answer.refused.startswith("engines take turns with the trainer")
        assert len(roles) == 1
    finally:
        end_all(roles, 0.1)


@pytest.mark.parametrize("text", ["two more, please", '{"add": -1}'])
def test_a_file_that_is_no_request_is_answered(conductor, text):
    """Injected: somebody wrote a file by hand."""
    spec, _ = conductor
    (spec.run_dir / REQUESTS_DIR).mkdir(exist_ok=True)
    (spec.run_dir / REQUESTS_DIR / "mine.request").write_text(text)
    answer = spec.run_dir / REQUESTS_DIR / "mine.answer"
    Deadline("an answer", 20).wait_until(answer.exists)
    assert "no request" in answer.read_text()


def test_a3_a_conductor_that_does_not_answer_is_named(tmp_path):
    """Injected: the roles of the run were started one by one."""
    with pytest.raises(DeadlineExceeded, match=r"conductor of .*have no conductor"):
        ask(tmp_path, EngineRequest(add=1), 0.2)
    assert list((tmp_path / REQUESTS_DIR).iterdir()) == []


@pytest.mark.parametrize("command", [["list"], ["add"], ["remove", "engine-0"]])
def test_a_directory_of_no_run_is_one_clear_line(tmp_path, command):
    result = CliRunner().invoke(app, ["engines", command[0], str(tmp_path), *command[1:]])
    assert result.exit_code == 2
    assert str(tmp_path) in result.output.replace("\n", "")


def test_each_of_several_rollout_processes_keeps_an_engine(tmp_path):
    """Engines 0 and 2 are the first one's, engine 1 is the second one's."""
    spec = load_spec(write_spec(tmp_path, engine={"replicas": 3}, rollout={"processes": 2}))
    commands = [RoleCommand(f"engine-{n}", [sys.executable, "-c", SLEEP], engine_id=f"engine-{n}") for n in range(3)]
    roles = [RoleProcess(command, tmp_path) for command in commands]
    try:
        answer = ElasticEngines(Roles(spec, tmp_path / "spec.yaml"), print).change(
            EngineRequest(remove=["engine-1"]), roles, "by command"
        )
        assert answer.refused.startswith("that leaves rollout process 1 of 2 without an engine")
        assert [role.exit_code for role in roles] == [None] * 3
    finally:
        end_all(roles, 0.1)
