"""The trainer's calls go on with the rollout role that was started in the place of one that ended, or fail by name."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import (
    ADDRESS_FILE,
    TOKEN_HEADER,
    BatchTrained,
    HoldReply,
    HoldRequest,
    Refusal,
    ServiceAddress,
    SyncWanted,
    encode,
)
from slimerl.samples.messages import Path as Endpoint
from slimerl.training.rollout_client import BROKEN, NOT_TWICE, REPEATED, RoleGone, RolloutClient, ServiceFailed

WITHIN_S = 20.0


class Role:
    """Answers every call the same; `ends_at`: the path at whose call it is gone, without an answer."""

    def __init__(self, token: str, port: int = 0, ends_at: str = "") -> None:
        self.token, self.asked = token, list[str]()
        role = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def _answer(self) -> None:
                role.asked.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == ends_at:
                    role.server.shutdown()
                    role.server.server_close()
                    return
                known = self.headers[TOKEN_HEADER] == role.token
                body = encode(SyncWanted(["engine-0"])) if known else encode(Refusal("wrong token"))
                if known and self.path == Endpoint.HOLD:
                    body = encode(HoldReply("lease", []))
                self.send_response(200 if known else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_port
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def announce(self, run_dir: Path) -> "Role":
        address = ServiceAddress(f"http://127.0.0.1:{self.port}", self.token, 1)
        (run_dir / ADDRESS_FILE).write_bytes(msgspec.json.encode(address))
        return self

    def end(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def roles() -> Iterator[list[Role]]:
    started: list[Role] = []
    yield started
    for role in started:
        role.end()


def connected(run_dir: Path, successor_s: float = WITHIN_S) -> RolloutClient:
    return RolloutClient.connect(run_dir, Deadline("the role", 10.0), 10.0, successor_s)


def later(act: object, *arguments: object) -> None:
    threading.Timer(0.3, act, arguments).start()


def test_a5_a_call_whose_role_ends_before_it_answers_is_made_again_with_the_next_one(tmp_path, roles):
    """Injected: the role is gone in the middle of a call; the next one is announced a moment later."""
    roles += [Role("first", ends_at=Endpoint.NEXT_BATCH).announce(tmp_path), Role("second")]
    client = connected(tmp_path)
    later(roles[1].announce, tmp_path)
    assert client.next_batch(3, 10.0) == SyncWanted(["engine-0"])
    assert client.hold(HoldRequest(3, 1.0)).lease_id == "lease"
    assert roles[0].asked == [Endpoint.HEALTH, Endpoint.NEXT_BATCH]
    assert roles[1].asked == [Endpoint.NEXT_BATCH, Endpoint.HOLD]


def test_a_role_that_listens_at_the_port_of_the_one_that_ended_is_known_by_its_token(tmp_path, roles):
    """Injected: `rollout.port` is fixed, and the address file still tells of the first role."""
    first = Role("first").announce(tmp_path)
    client = connected(tmp_path)
    first.end()
    roles.append(Role("second", port=first.port))
    later(roles[0].announce, tmp_path)
    assert client.next_batch(3, 10.0) == SyncWanted(["engine-0"])


def breaks(role: Role, path: Endpoint, times: int) -> list[str]:
    """So many connections are closed without an answer when this is asked; the role answers others. Returns those."""
    handler = role.server.RequestHandlerClass
    answer, broken = handler._answer, list[str]()

    def breaking(self) -> None:
        if self.path == path and len(broken) < times:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            broken.append(self.path)
            return
        answer(self)

    handler._answer = breaking
    return broken


@pytest.mark.parametrize("successor_s", [0.0, WITHIN_S])
def test_a_call_whose_connection_broke_although_its_role_lives_is_made_again(tmp_path, roles, successor_s):
    """Injected: connections that are closed without an answer. Each would cost the run one of its restarts, and two
    without a step between them the run."""
    roles.append(Role("first").announce(tmp_path))
    client = connected(tmp_path, successor_s)
    broken = breaks(roles[0], Endpoint.NEXT_BATCH, BROKEN)
    assert client.next_batch(3, 10.0) == SyncWanted(["engine-0"])
    assert len(broken) == BROKEN


@pytest.mark.parametrize("path", [Endpoint.BATCH_TRAINED, *NOT_TWICE])
def test_a_connection_that_breaks_each_time_is_told_soon(tmp_path, roles, path):
    """Injected: connections that are closed without an answer, each time. A call that must not be made twice of one
    role is not."""
    roles.append(Role("first").announce(tmp_path))
    client = connected(tmp_path)
    broken = breaks(roles[0], path, 100)
    begun = time.monotonic()
    with pytest.raises(RoleGone, match=rf"{path}: the rollout role at .* cannot be reached"):
        client._ask("POST", path, BatchTrained("step-1", 1), None)
    assert len(broken) == (1 if path in NOT_TWICE else 1 + BROKEN)
    assert time.monotonic() - begun < WITHIN_S / 2


@pytest.mark.parametrize(("successor_s", "error"), [(0.0, ServiceFailed), (0.5, DeadlineExceeded)])
def test_a3_a_role_that_nobody_starts_again_is_waited_for_so_long_and_no_longer(tmp_path, successor_s, error):
    role = Role("first").announce(tmp_path)
    client = connected(tmp_path, successor_s)
    role.end()
    with pytest.raises(error, match=r"/status: the rollout role at .* cannot be reached"):
        client.status()


def test_what_would_end_the_next_role_too_is_asked_of_one_alone(tmp_path, roles):
    roles += [Role("first").announce(tmp_path), Role("second")]
    client = connected(tmp_path)
    roles.pop(0).end()
    roles[0].announce(tmp_path)
    with pytest.raises(RoleGone):
        client.shutdown()
    assert roles[0].asked == []
    assert Endpoint.SHUTDOWN not in REPEATED
