"""What sockets alone take: whole requests are handed on to the engines in turn, and whole answers back, unread.

Not a router, but the bound of all that are one process of Python: it looks for the end of a request or an answer, and
writes its pieces as they came. For the row `raw pass-through` of tools/bench_gateway_server.py.
"""

import asyncio
import itertools
import re
from typing import cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"\r\n\r\n"


class _Engine:
    """`idle`: connections that nothing is asked on."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self.idle: list[_Asked] = []


class _Whole(asyncio.Protocol):
    """Collects the pieces of one message after the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._pieces:
            # a head comes whole: those of the bench are short
            end = data.index(_END)
            length = _LENGTH.search(data, 0, end)
            self._missing = end + len(_END) + (int(length[1]) if length else 0)
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing <= 0:
            pieces, self._pieces = self._pieces, []
            self.whole(pieces)

    def whole(self, pieces: list[bytes]) -> None:
        raise NotImplementedError


class _Asked(_Whole):
    """A connection to an engine."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__()
        self._engine = engine
        self._client: _Client | None = None

    def ask(self, client: "_Client", request: list[bytes]) -> None:
        self._client = client
        self.transport.writelines(request)

    def whole(self, pieces: list[bytes]) -> None:
        self._engine.idle.append(self)
        if self._client is not None:
            self._client.transport.writelines(pieces)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._engine.idle:
            self._engine.idle.remove(self)


class _Client(_Whole):
    def __init__(self, turns: "itertools.cycle[_Engine]") -> None:
        super().__init__()
        self._turns = turns
        self._connecting: asyncio.Task[None] | None = None

    def whole(self, pieces: list[bytes]) -> None:
        engine = next(self._turns)
        if engine.idle:
            engine.idle.pop().ask(self, pieces)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._ask_first(engine, pieces))

    async def _ask_first(self, engine: _Engine, pieces: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        _, asked = await loop.create_connection(lambda: _Asked(engine), engine.host, engine.port)
        asked.ask(self, pieces)


async def serve_raw(urls: list[str]) -> None:
    """Prints its URL, then serves."""
    turns = itertools.cycle([_Engine(url) for url in urls])
    server = await asyncio.get_running_loop().create_server(lambda: _Client(turns), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()
