"""The engine role as a process: registers, says what it does, and leaves nothing behind however it ends."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from control_service import ControlService
from engine_fixtures import engine_spec
from tiny_models import make_tiny_model
from traces import Traces

from slimerl.engine.registration import RegistrationFailed, register
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import EngineInfo
from slimerl.spec.load import dump_spec

START_S = 240.0
END_S = 20.0


@dataclass
class Role:
    """A running `python -m slimerl.engine`."""

    process: subprocess.Popen
    log: Path
    run_dir: Path

    def said(self) -> str:
        return self.log.read_text()

    def wait_until_said(self, what: str) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the role ended:\n{self.said()}"
            return what in self.said()

        Deadline(f"the role to say {what!r}", START_S).wait_until(ready, detail=self.said)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("role") / "model")


@pytest.fixture
def start_role(model: Path, tmp_path: Path) -> Iterator:
    started: list[Role] = []

    def start(**engine: object) -> Role:
        run_dir = tmp_path / "run"
        spec = engine_spec(model, run_dir, replicas=4, **engine)
        run_dir.mkdir()
        (run_dir / "spec.yaml").write_text(dump_spec(spec))
        log = tmp_path / "role.log"
        command = [sys.executable, "-m", "slimerl.engine", str(run_dir / "spec.yaml"), "--index", "3"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        started.append(Role(process, log, run_dir))
        return started[-1]

    yield start
    for role in started:
        role.process.kill()
        role.process.wait()


def test_a5_a_killed_role_leaves_no_process_port_or_shared_memory(start_role) -> None:
    """Fault: SIGKILL, with two ranks running, whose message queue lies in /dev/shm."""
    role = start_role(tensor_parallel=2)
    with ControlService(role.run_dir) as control:
        role.wait_until_said("registered with the rollout role")
    [info] = control.registered
    assert (info.engine_id, info.tensor_parallel, info.version) == ("engine-3", 2, -1)
    traces = Traces.below(role.process.pid)
    names = " ".join(process.name() for process in traces.processes)
    assert names.count("sglang::sched") == 2
    assert _port_of(info) in traces.ports
    assert any("sgl_shm" in path for path in traces.files)
    assert any(path.startswith("/tmp/slimerl-engine-3-") for path in traces.files)
    role.process.kill()
    traces.wait_until_gone()


def test_a5_a_role_killed_while_its_server_starts_leaves_nothing(start_role) -> None:
    """Fault: SIGKILL before SGLang's own ties to its parent are in place."""
    role = start_role()
    role.wait_until_said("starting SGLang")
    workers = Deadline("the server's workers", START_S)
    workers.wait_until(lambda: len(Traces.below(role.process.pid).processes) >= 4, poll_s=0.02)
    traces = Traces.below(role.process.pid)
    role.process.kill()
    traces.wait_until_gone()


def test_a5_a_role_that_is_asked_to_stop_ends_its_server_and_exits_with_0(start_role) -> None:
    role = start_role()
    role.wait_until_said("starting SGLang")
    traces = Traces.below(role.process.pid)
    role.process.send_signal(signal.SIGTERM)
    assert role.process.wait(END_S) == 0
    traces.wait_until_gone()
    assert role.said().splitlines()[-1] == "engine-3: stopping the server"


def test_a5_a_server_that_dies_ends_the_role_with_the_reason(start_role) -> None:
    """Fault: the server's own process is killed."""
    role = start_role()
    role.wait_until_said("starting SGLang")
    serve = _server_of(role)
    serve.kill()
    assert role.process.wait(END_S) == 1
    assert "engine-3: the SGLang server was killed by SIGKILL; the end of " in role.said()


def test_a_server_that_cannot_start_ends_the_role_with_the_tail_of_its_log(start_role) -> None:
    role = start_role(extra_args=("--no-such-argument",))
    assert role.process.wait(START_S) == 1
    assert "engine-3: the SGLang server ended with exit code 2" in role.said()
    assert "unrecognized arguments: --no-such-argument" in role.said()


def test_a_refused_registration_is_final_and_says_why(tmp_path: Path) -> None:
    info = EngineInfo("engine-9", "http://127.0.0.1:1", "key", 1)
    with (
        ControlService(tmp_path, refuse="engine-9 is one too many") as control,
        pytest.raises(RegistrationFailed, match=r"refused engine-9 \(409\): engine-9 is one too many"),
    ):
        asyncio.run(register(info, tmp_path, Deadline("registration", 10.0)))
    assert control.attempts == 1


def test_a3_a_control_service_that_never_comes_is_a_named_deadline(tmp_path: Path) -> None:
    info = EngineInfo("engine-9", "http://127.0.0.1:1", "key", 1)
    with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for registration .*rollout.json is not there"):
        asyncio.run(register(info, tmp_path, Deadline("registration", 0.3)))


def _server_of(role: Role) -> psutil.Process:
    def servers() -> list[psutil.Process]:
        children = psutil.Process(role.process.pid).children()
        return [child for child in children if "slimerl.engine.inside.serve" in child.cmdline()]

    Deadline("the server process", END_S).wait_until(lambda: bool(servers()), poll_s=0.02)
    return servers()[0]


def _port_of(info: EngineInfo) -> int:
    return int(info.url.rpartition(":")[2])
