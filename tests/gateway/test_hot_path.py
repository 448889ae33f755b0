"""/generate without the framework: the same answers, whatever the way in, and connections that do not get lost."""

import asyncio
import gc
import json
from typing import Any

import pytest
from gateway_scene import KEY, Front, ids, play
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.rollout.gateway import hot_path
from slimerl.rollout.gateway.answers import Answer
from slimerl.rollout.gateway.hot_path import HotPath

PROMPT = ids("How many?")


def head(length: int, session: str = "", key: str = KEY, more: str = "") -> bytes:
    named = f"X-Session-Id: {session}\r\n" if session else ""
    return (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{named}{more}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def chunked(body: bytes, session: str, key: str) -> bytes:
    """The same request in a form that is the framework's alone."""
    given = head(0, session, key).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n" if body else b""
    return given + chunk + b"0\r\n\r\n"


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def exchange(front: Front, *requests: bytes) -> list[tuple[int, bytes]]:
    """All at once on one connection."""
    host, _, port = front.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"".join(requests))
    answers = [await answer_of(reader) for _ in requests]
    writer.close()
    return answers


BODIES = (
    {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 40, "sampling_seed": 5}, "return_logprob": True},
    {"text": "How many?", "sampling_params": {"sampling_seed": 5}},
    {"input_ids": PROMPT, "sampling_params": {"sampling_seed": 5, "stop": ["ply"]}},
    {"input_ids": []},
    {"input_ids": [-1]},
    {"input_ids": [1 << 31]},
    {"input_ids": "no"},
    {"input_ids": PROMPT, "sampling_params": {"top_k": 3}},
    {"input_ids": PROMPT, "sampling_params": {"temperature": 0.5}},
)


def test_answers_and_errors_are_those_of_the_framework():
    async def act(front: Front) -> None:
        cases = [(json.dumps(body).encode(), f"s{number}", KEY) for number, body in enumerate(BODIES)]
        cases += [(b"{", "s", KEY), (b"", "s", KEY), (cases[0][0], "x" * 300, KEY), (cases[0][0], "s", "wrong")]
        for body, session, key in cases:
            front.gateway.take_figures()
            ((status, told),) = await exchange(front, head(len(body), session, key) + body)
            counts = front.gateway.take_figures()
            ((expected_status, expected),) = await exchange(front, chunked(body, f"{session}-", key))
            assert (status, unnamed(told)) == (expected_status, unnamed(expected)), body
            assert counts.get("gateway/requests", 0) == (status == 200)
            assert sum(number for name, number in counts.items() if "errors_" in name) == (status != 200)
        front.gateway.stopping = True
        ((status, told),) = await exchange(front, head(len(cases[0][0])) + cases[0][0])
        assert (status, json.loads(told)["error"]["code"]) == (503, "shutting_down")

    play(act, engines=1)


def test_a_key_that_is_no_utf8_is_a_wrong_one_and_such_a_name_of_a_session_is_none():
    async def act(front: Front) -> None:
        for plain in (head(2) + b"{}", chunked(b"{}", "", KEY)):
            [(status, body)] = await exchange(front, plain.replace(KEY.encode(), b"caf\xe9"))
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        for named in (head(2, "NAME") + b"{}", chunked(b"{}", "NAME", KEY)):
            [(status, body)] = await exchange(front, named.replace(b"NAME", b"caf\xe9"))
            assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_session")

    play(act)


def unnamed(body: bytes) -> Any:
    """Without what every answer has of its own."""
    answer = json.loads(body)
    for name in ("id", "e2e_latency"):
        answer.get("meta_info", {}).pop(name, None)
    return answer


def test_a_stream_is_answered_as_one_on_the_same_connection():
    async def act(front: Front) -> None:
        whole = json.dumps({"input_ids": PROMPT, "sampling_params": {"sampling_seed": 5}}).encode()
        streamed = json.dumps({"stream": True, **json.loads(whole)}).encode()
        host, _, port = front.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head(len(whole), "s") + whole + head(len(streamed), "s") + streamed)
        status, answer = await answer_of(reader)
        assert status == 200
        assert b"text/event-stream" in (await reader.readuntil(b"\r\n\r\n")).lower()
        last = (await reader.readuntil(b"data: [DONE]")).split(b"data: ")[-2]
        assert unnamed(last[: last.rindex(b"}") + 1])["output_ids"] == json.loads(answer)["output_ids"]
        writer.close()

    play(act, engines=1)


class Foreign(asyncio.Protocol):
    """In the framework's place: keeps what it is given."""

    def __init__(self, given: bytearray) -> None:
        self.given = given

    def data_received(self, data: bytes) -> None:
        self.given += data


class Wire(asyncio.Transport):
    """Keeps what is written, and whose the connection is."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.protocol, self.reading, self.aborted = bytearray(), None, True, False

    def write(self, data: Any) -> None:
        self.written += data

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


async def settled(path: HotPath) -> None:
    """Until nothing is being answered."""
    while under_way := [each.answered() for each in path.open if each.is_answering]:
        await asyncio.wait(under_way)
        await asyncio.sleep(0)


def echoing(authorization: str, session: str, data: bytes) -> hot_path.Answering | None:
    async def answer() -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return 200, session.encode() + b"/" + data

    return None if data == b"stream" else answer()


PLAIN = st.tuples(st.sampled_from(["a", "b"]), st.binary(max_size=40)).map(lambda each: (each[0], each[1]))
FOREIGN = st.sampled_from(
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /generate HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\n\r\n",
        head(2, more="Expect: 100-continue\r\n") + b"{}",
        head(2, more="Connection: close\r\n") + b"{}",
        head(2, more="Content-Length: 3\r\n") + b"{}",
        head(2, more=" folded: 1\r\n") + b"{}",
        head(2, more="a: b\nc: d\r\n") + b"{}",
        head(2, more="Content-Encoding: gzip\r\n") + b"{}",
        head(1 << 20),
        head(6) + b"stream",
        b"nonsense\r\n\r\n",
        b"x" * (hot_path.MAX_HEAD_BYTES + 1),
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.lists(PLAIN, max_size=4), FOREIGN, st.lists(st.integers(0, 600), max_size=12))
def test_however_bytes_come_plain_requests_are_answered_in_order_and_the_rest_is_the_frameworks(plain, foreign, cuts):
    async def run() -> None:
        given = bytearray()
        path = HotPath(echoing, lambda: Foreign(given), 1 << 16)
        connection, wire = path.connection(), Wire()
        connection.connection_made(wire)
        plain_now = [(session, data) for session, data in plain if data != b"stream"]
        whole = b"".join(head(len(data), session) + data for session, data in plain_now) + foreign
        at = 0
        for cut in [*sorted(cuts), len(whole)]:
            if piece := whole[at:cut]:
                (wire.protocol or connection).data_received(piece)
                await settled(path)
            at = max(at, cut)
        expected = b"".join(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told)
            for told in (f"{session}/".encode() + data for session, data in plain_now)
        )
        assert bytes(wire.written) == expected
        assert bytes(given) == foreign

    asyncio.run(run())


def test_a_client_that_does_not_wait_is_answered_one_request_at_a_time():
    async def run() -> None:
        gate, running = asyncio.Event(), []

        def begin(authorization: str, session: str, data: bytes) -> hot_path.Answering:
            running.append(session)

            async def answer() -> tuple[int, bytes]:
                await gate.wait()
                return 200, b"{}"

            return answer()

        path = HotPath(begin, lambda: Foreign(bytearray()), 1 << 16)
        connection, wire = path.connection(), Wire()
        connection.connection_made(wire)
        connection.data_received(b"".join(head(0, f"s{number}") for number in range(3)))
        assert running == ["s0"]
        connection.pause_writing()
        assert not wire.reading
        connection.resume_writing()
        assert wire.reading
        connection.data_received(bytes(path.max_body_bytes))
        assert wire.aborted
        gate.set()
        await path.close(1.0)

    asyncio.run(run())


@pytest.mark.parametrize("patient", [True, False])
def test_the_end_waits_for_answers_that_are_under_way_but_not_for_ever(patient):
    async def run() -> None:
        gate = asyncio.Event()

        def begin(authorization: str, session: str, data: bytes) -> hot_path.Answering:
            async def answer() -> tuple[int, bytes]:
                await gate.wait()
                return 200, b"{}"

            return answer()

        path = HotPath(begin, lambda: Foreign(bytearray()), 1 << 16)
        connection, wire = path.connection(), Wire()
        connection.connection_made(wire)
        connection.data_received(head(0))
        if patient:
            asyncio.get_running_loop().call_soon(gate.set)
        await path.close(10.0 if patient else 0.01)
        assert wire.aborted
        assert bool(wire.written) is patient

    asyncio.run(run())


def test_a_connection_on_which_nothing_is_asked_ends(monkeypatch):
    async def run() -> None:
        monkeypatch.setattr(hot_path, "IDLE_S", 0.0)
        connection, wire = HotPath(echoing, lambda: Foreign(bytearray()), 1 << 16).connection(), Wire()
        connection.connection_made(wire)
        assert wire.aborted

    asyncio.run(run())


def test_what_was_answered_is_let_go_without_a_collection():
    def alive() -> int:
        return sum(isinstance(each, Answer) for each in gc.get_objects())

    async def act(front: Front) -> None:
        body = json.dumps({"input_ids": PROMPT, "sampling_params": {"sampling_seed": 5}}).encode()
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for number in range(3):
                ((status, _),) = await exchange(front, head(len(body), f"s{number}") + body)
                assert status == 200
            assert alive() == before
        finally:
            gc.enable()

    play(act, engines=1)
