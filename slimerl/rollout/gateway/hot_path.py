"""The requests that come by the thousand, without a web framework: `POST /generate` of clients that read no stream.

Flows in: the connections of the gateway's port. Flows out: whole answers. A connection on which something else is asked
for belongs to the framework from there on, with all bytes that were not answered yet: what is not plainly such a
request is not interpreted here. The framework's reading of a request and writing of an answer take half as much CPU
time as all that the gateway does for it.
Invariants: requests of a connection are answered one at a time, in order; a client that goes cancels what is done for
it; a client that does not read its answers is not read from.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

Answering = Coroutine[Any, Any, tuple[int, bytes]]
"""Gives status and JSON."""
Begin = Callable[[str, str, bytes], Answering | None]
"""From the values of `Authorization` and `x-session-id`, empty where they are missing, and the body. None: the answer
would be a stream."""

_START = b"POST /generate HTTP/1.1\r\n"
_END = b"\r\n\r\n"
MAX_HEAD_BYTES = 8 * 2**10
IDLE_S = 3630.0
"""For a connection on which nothing is asked; as the framework's."""
_FOREIGN = frozenset({"transfer-encoding", "expect", "content-encoding", "upgrade"})
"""Headers that ask for more than this module knows."""


_Head = tuple[int, int, str, str]
"""Of a request: where its body begins, its length, and the values that the answer depends on."""


class HotPath:
    """All connections of a port. `others`: makes the framework's protocol for a connection."""

    def __init__(self, begin: Begin, others: Callable[[], asyncio.BaseProtocol], max_body_bytes: int) -> None:
        self.begin = begin
        self.others = others
        self.max_body_bytes = max_body_bytes
        self.open: set[_Connection] = set()

    def connection(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return _Connection(self)

    async def close(self, grace_s: float) -> None:
        """Wait so long for the answers that are under way, then end all connections."""
        if under_way := [each.answered() for each in self.open if each.is_answering]:
            await asyncio.wait(under_way, timeout=grace_s)
        tasks = [each.task for each in self.open if each.task is not None]
        for connection in list(self.open):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection(asyncio.Protocol):
    def __init__(self, path: HotPath) -> None:
        self.task: asyncio.Task[None] | None = None
        """Answers all requests, one after the other; None: there was none yet."""
        self.is_answering = False
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._data = b""
        """Not answered, nor being answered."""
        self._pieces: list[bytes] = []
        """... what came behind it of a body that is not whole yet."""
        self._missing = 0
        """Bytes of that body."""
        self._head: _Head | None = None
        """Of that request."""
        self._next: Answering | None = None
        """To be begun by the task."""
        self._asked: asyncio.Future[None] | None = None
        """The task waits for it, when there is nothing to be answered."""
        self._given: asyncio.Future[None] | None = None
        """Somebody waits for the answer that is under way."""
        self._used_s = self._loop.time()

    def answered(self) -> "asyncio.Future[None]":
        """Done once the answer that is under way was given, or nobody is there any more to take it."""
        self._given = self._given or self._loop.create_future()
        return self._given

    def abort(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._path.open.add(self)
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._end_if_idle()

    def connection_lost(self, error: Exception | None) -> None:
        self._path.open.discard(self)
        self._end()
        self._transport = None

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._missing > len(data):
            self._pieces.append(data)
            self._missing -= len(data)
            return
        if self._pieces:
            data = b"".join((*self._pieces, data))
            self._pieces.clear()
        self._missing = 0
        self._data = self._data + data if self._data else data
        if not self.is_answering:
            self._read()
        elif len(self._data) > self._path.max_body_bytes and self._transport is not None:
            self.abort()  # it sends requests by the megabyte without waiting for an answer

    # --- one request

    def _read(self) -> None:
        """Begin with what is there, if it is a whole request."""
        data = self._data
        head = self._head or self._read_head(data)
        if head is None:
            return
        begin, length, authorization, session = head
        end = begin + length
        if len(data) < end:
            self._head, self._missing = head, end - len(data)
            self._data, self._pieces = b"", [data]
            return
        self._head = None
        answering = self._path.begin(authorization, session, data[begin:end])
        if answering is None:
            self._hand_over()
            return
        self._data = data[end:]
        self._next, self.is_answering = answering, True
        if self.task is None:
            self.task = self._loop.create_task(self._serve())
        elif self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    async def _serve(self) -> None:
        """One task for all requests of the connection costs less than one for each."""
        while True:
            answering, self._next = self._next, None
            if answering is None:
                self._asked = self._loop.create_future()
                await self._asked
                continue
            try:
                self._answered(*await answering)
            except ConnectionError:
                self.abort()

    def _end(self) -> None:
        """Nobody waits for answers any more."""
        if self.task is not None:
            self.task.cancel()
        if self._next is not None:
            self._next.close()
        self._note_given()

    def _note_given(self) -> None:
        self.is_answering = False
        if self._given is not None:
            self._given.set_result(None)
            self._given = None

    def _read_head(self, data: bytes) -> _Head | None:
        """None: it is not whole yet, or the connection is the framework's now."""
        end = data.find(_END)
        if end < 0:
            if len(data) > MAX_HEAD_BYTES or not _START.startswith(data[: len(_START)]):
                self._hand_over()
            return None
        asked = _head(data[:end]) if data.startswith(_START) else None
        if asked is None or asked[0] > self._path.max_body_bytes:
            self._hand_over()
            return None
        return end + len(_END), *asked

    def _answered(self, status: int, body: bytes) -> None:
        self._used_s = self._loop.time()
        self._note_given()
        if self._transport is None:
            return
        reason = "OK" if status == 200 else HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if self._data:
            self._read()

    def _end_if_idle(self) -> None:
        if self._transport is None:
            return
        left_s = self._used_s + IDLE_S - self._loop.time()
        if not self.is_answering and left_s <= 0:
            self.abort()
        else:
            self._loop.call_later(max(left_s, 1.0), self._end_if_idle)

    def _hand_over(self) -> None:
        transport, path = self._transport, self._path
        if transport is None:
            return
        self._end()
        path.open.discard(self)
        protocol = cast(asyncio.Protocol, path.others())
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(self._data)
        self._data, self._transport = b"", None


def _head(data: bytes) -> tuple[int, str, str] | None:
    """Length of the body, and the headers that the answer depends on; None: more is asked for than is known here, or
    it is not plain HTTP."""
    lines = data.decode("utf-8", "surrogateescape").split("\r\n")
    fields = list(map(_field, lines[1:]))
    headers = dict(fields)
    if len(headers) != len(fields) or "" in headers:
        return None
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()) or len(length) > 12 or not _FOREIGN.isdisjoint(headers):
        return None
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    return int(length), headers.get("authorization", ""), headers.get("x-session-id", "")


@lru_cache(maxsize=4096)
def _field(line: str) -> tuple[str, str]:
    """Name and value of a header; empty: it is none. All but one or two of a client are the same in every request."""
    name, colon, value = line.partition(":")
    name = name.lower()
    if not colon or not name or name.strip() != name or "\n" in line or "\r" in line:
        return "", ""
    return name, value.strip(" \t")
