"""HTTP/1.1 to one server over connections that are kept: what the client of an engine needs, and no more.

Flows in: a method, a path, a body. Flows out: a status and a body, whole or as it comes, or `ConnectionLost`. The
client of aiohttp can do much else, and takes more CPU time than all that the rollout role does for a request.
Invariants: a connection has one request at a time; one whose request was cancelled or took too long, or whose answer
was not read to its end, is never used again; nor is one that has idled so long that the server may be closing it.
"""

import asyncio
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import cast
from urllib.parse import urlsplit

from slimerl.resilience.time_limit import TimeLimits

MAX_HEAD_BYTES = 64 * 2**10
_FIELDS = re.compile(rb"\r\n(content-length|transfer-encoding|connection):([^\r]*)")
"""Of a head in small letters."""

Take = Callable[[bytes], None]
"""Given pieces of a body as they come."""


class ConnectionLost(ConnectionError):
    """No connection, or it ended or made no sense before the whole answer was there."""


class Connections:
    """To one `http://host:port`. Belongs to the event loop that first uses it.

    Args:
        headers: of every request.
        keep_s: an idle connection is used again for so long; less than the server keeps it.
    """

    def __init__(self, url: str, headers: Mapping[str, str], keep_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url!r} is no http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        lines = [f"Host: {parts.netloc}", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join(lines)
        self._keep_s = keep_s
        self._limits = TimeLimits()
        self._idle: deque[_Connection] = deque()
        """The one that was used last comes last."""
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] = (),
        take: Take | None = None,
        limit_s: float = math.inf,
    ) -> tuple[int, bytes]:
        """Status and body of the answer.

        Args:
            body: in pieces, one behind the other.
            take: given the body chunk by chunk, where it comes in chunks and with status 200; the body that is returned
                is empty then. What it raises ends the request, and is raised.
            limit_s: for the answer, and before that for a connection where there is none.

        Raises:
            ConnectionLost: see there; whether the request has had an effect is not known.
            TimeoutError: likewise.
        """
        length = sum(map(len, body))
        head = f"{method} {path} HTTP/1.1\r\n{self._head}\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")
        connection = self._kept()
        if connection is None:
            with self._limits.within(limit_s):
                connection = await self._connected()
        line = self._limits.join(connection, limit_s)
        try:
            answer = await connection.asked(b"".join((head, *body)), take)
        except BaseException:
            connection.abort()
            raise
        finally:
            line.leave(connection)
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def close(self) -> None:
        """End all connections, and with them the requests on them."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> "_Connection | None":
        """One that idles. Those that have for too long are closed."""
        oldest = time.monotonic() - self._keep_s
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connected(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self._open), self._host, self._port)
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """`registry`: all that are open."""

    def __init__(self, registry: "set[_Connection]") -> None:
        self.idle_since = 0.0
        self.ends_s = math.inf
        """For who limits the time of a request."""
        self.reusable = True
        self._registry = registry
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._data = b""
        """Not read yet."""
        self._pieces: list[bytes] = []
        """... what came behind it of a body, or of a chunk, that is not whole yet."""
        self._missing = 0
        """Bytes of that."""
        self._status = 0
        """0: the head is not there yet."""
        self._length: int | None = None
        """Bytes of the body; None: it is chunked, or ends with the connection."""
        self._chunked = False
        self._chunks: list[bytes] = []
        self._take: Take | None = None

    def asked(self, request: bytes, take: Take | None) -> "asyncio.Future[tuple[int, bytes]]":
        """Send it; what is given ends with the answer. Raises ConnectionLost."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the server closed the connection")
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._status, self._take = 0, take
        self._transport.write(request)
        return answer

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The time of its request is over."""
        self._end_with(TimeoutError())

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked
            return
        if self._missing > len(data):
            self._pieces.append(data)
            self._missing -= len(data)
            return
        self._missing, self._data = 0, self._all_data(data)
        try:
            self._read()
        except (ValueError, IndexError) as error:
            self._fail(f"an answer that is not HTTP/1.1: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._registry.discard(self)
        if self._status and self._length is None and not self._chunked and error is None:
            self._finish(self._all_data(b""))
        self._fail(f"the server closed the connection{f': {error}' if error else ''}")

    # --- reading an answer

    def _all_data(self, last: bytes) -> bytes:
        if self._pieces:
            last = b"".join((self._data, *self._pieces, last))
            self._pieces.clear()
            return last
        return self._data + last if self._data else last

    def _read(self) -> None:
        while not self._status:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                if len(self._data) > MAX_HEAD_BYTES:
                    raise ValueError(f"its head has more than {MAX_HEAD_BYTES} bytes")
                return
            head = self._data[:end].lower()
            if not head.startswith(b"http/1."):
                raise ValueError(repr(head[:40]))
            status = int(head[9:12])
            self._data = self._data[end + 4 :]
            # 1xx announce the answer proper
            if status >= 200:
                self._begin(status, head)
        if self._chunked:
            self._read_chunks()
        elif self._length is None:
            self._missing = sys.maxsize
        elif len(self._data) < self._length:
            self._missing = self._length - len(self._data)
        else:
            body, self._data = self._data[: self._length], self._data[self._length :]
            self._finish(body)

    def _begin(self, status: int, head: bytes) -> None:
        fields = dict(_FIELDS.findall(head))
        self._status = status
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        length = fields.get(b"content-length")
        self._length = 0 if status in (204, 304) else _size(length, 10) if length is not None else None
        self._chunks.clear()
        if b"close" in fields.get(b"connection", b"") or head.startswith(b"http/1.0"):
            self.reusable = False

    def _read_chunks(self) -> None:
        data, begin = self._data, 0
        while (line_end := data.find(b"\r\n", begin)) >= 0:
            size = _size(data[begin:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                self._missing = end + 2 - len(data)
                break
            chunk, begin = data[line_end + 2 : end], end + 2
            if size == 0:
                self._data = data[begin:]
                self._finish(b"".join(self._chunks))
                return
            if self._take is None or self._status != 200:
                self._chunks.append(chunk)
            elif not self._passed_on(self._take, chunk):
                return
        self._data = data[begin:]

    def _passed_on(self, take: Take, chunk: bytes) -> bool:
        try:
            take(chunk)
        except Exception as error:  # noqa: BLE001 - raised to whoever asked
            self._end_with(error)
            return False
        return True

    def _finish(self, body: bytes) -> None:
        if self._data:
            self.reusable = False  # more than was asked for
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, body))

    def _fail(self, why: str) -> None:
        self._end_with(ConnectionLost(why))

    def _end_with(self, error: Exception) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        with suppress(OSError):
            self.abort()


def _size(text: bytes, base: int) -> int:
    """Raises ValueError where it is none: a negative one would be read for ever."""
    size = int(text, base)
    if size < 0:
        raise ValueError(f"{size} bytes")
    return size
