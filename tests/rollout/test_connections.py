"""The client's own HTTP against aiohttp's server, and against servers that misbehave."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slimerl.engine.connections import ConnectionLost, Connections


@asynccontextmanager
async def served(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    application = web.Application(client_max_size=1 << 27)
    application.add_routes([web.route("*", "/{path:.*}", handle)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    connections = Connections(f"http://127.0.0.1:{runner.addresses[0][1]}", {"Authorization": "Bearer k"}, 2.0)
    try:
        yield connections
    finally:
        connections.close()
        await runner.cleanup()


@asynccontextmanager
async def answering(*pieces: bytes, hang_up: bool = False):
    """A server of raw bytes, each piece in a packet of its own, for every request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if hang_up:
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, 2.0)
    try:
        yield connections
    finally:
        connections.close()
        server.close()


def test_hundreds_of_requests_at_once_get_each_its_own_answer():
    """Bodies of all sizes, whole or in chunks; connections are kept."""

    async def echo(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer k"
        body = await request.read()
        if len(body) % 3:
            return web.Response(body=body, status=200 + len(body) % 2)
        stream = web.StreamResponse(status=200 + len(body) % 2)
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        for start in range(0, len(body), 1000):
            await stream.write(body[start : start + 1000])
        return stream

    async def run() -> None:
        rng = random.Random(0)
        async with served(echo) as connections:

            async def ask() -> None:
                for _ in range(5):
                    body = rng.randbytes(rng.choice([0, 1, 10, 999, 3000, 100_000]))
                    status, answer = await connections.request("POST", "/x", (body,))
                    assert (status, answer) == (200 + len(body) % 2, body)

            await asyncio.gather(*(ask() for _ in range(60)))
            assert len(connections._open) <= 60
            assert len(connections._idle) == len(connections._open)
            big = rng.randbytes(30 << 20)
            assert await connections.request("POST", "/x", (big,)) == (200 + len(big) % 2, big)

    asyncio.run(run())


def slow_until(release: asyncio.Event) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Answers with the path, that of /slow not before `release`."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await release.wait()
        return web.Response(text=request.path)

    return answer


def test_a6_a_cancelled_request_takes_its_connection_with_it():
    """Fault: the answer to an abandoned request comes later, and must not become that of the next."""
    release = asyncio.Event()

    async def run() -> None:
        async with served(slow_until(release)) as connections:
            await connections.request("GET", "/warm", ())
            asking = asyncio.ensure_future(connections.request("GET", "/slow", ()))
            await asyncio.sleep(0.05)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            release.set()
            assert await connections.request("GET", "/next", ()) == (200, b"/next")
            assert len(connections._open) == 1

    asyncio.run(run())


def test_a_request_that_takes_too_long_takes_its_connection_with_it():
    release = asyncio.Event()

    async def run() -> None:
        async with served(slow_until(release)) as connections:
            await connections.request("GET", "/warm", (), limit_s=60.0)
            (kept,) = connections._open
            asked = asyncio.ensure_future(connections.request("GET", "/slow", (), limit_s=0.05))
            other = asyncio.ensure_future(connections.request("GET", "/slow", (), limit_s=60.0))
            with pytest.raises(TimeoutError):
                await asked
            assert not kept.reusable
            release.set()
            assert await other == (200, b"/slow")

    asyncio.run(run())


def test_a_connection_that_idled_too_long_or_was_closed_is_not_used_again():
    async def run() -> None:
        async def close_every_second(request: web.Request) -> web.Response:
            response = web.Response(text=str(request.transport.get_extra_info("peername")[1]))
            if request.path == "/last":
                response.force_close()
            return response

        async with served(close_every_second) as connections:
            first = await connections.request("GET", "/", ())
            assert await connections.request("GET", "/last", ()) == first
            third = await connections.request("GET", "/", ())
            assert third != first
            connections._idle[0].idle_since -= 3
            assert await connections.request("GET", "/", ()) != third

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\n\r", b"\nhe", b"llo"), (200, b"hello")),
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",), (503, b"")),
        (
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhel", b"lo\r\n3\r", b"\nyou\r\n0\r\n\r\n"),
            (200, b"helloyou"),
        ),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), (204, b"")),
    ],
)
def test_answers_are_read_however_they_are_cut(pieces, answer):
    async def run() -> None:
        async with answering(*pieces) as connections:
            for _ in range(2):
                assert await connections.request("GET", "/", ()) == answer
            assert len(connections._open) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel",), "the server closed the connection"),
        ((b"",), "the server closed the connection"),
        ((b"220 mail.example ESMTP\r\n\r\n",), "not HTTP/1.1"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",), "not HTTP/1.1"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-6\r\n",), "-6 bytes"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nhello",), "-3 bytes"),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,), "more than 65536 bytes"),
    ],
)
def test_an_answer_that_breaks_off_or_makes_no_sense_is_an_error(pieces, told):
    async def run() -> None:
        async with answering(*pieces, hang_up=True) as connections:
            with pytest.raises(ConnectionLost, match=told):
                await connections.request("GET", "/", ())
            assert not any(connection.reusable for connection in connections._open)

    asyncio.run(run())


def test_a_body_without_a_length_ends_with_the_connection():
    async def run() -> None:
        async with answering(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", hang_up=True) as connections:
            assert await connections.request("GET", "/", ()) == (200, b"hello")

    asyncio.run(run())


def test_nobody_listening_is_an_error_and_a_close_ends_what_is_under_way():
    async def forever(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def run() -> None:
        with pytest.raises(ConnectionLost, match="cannot connect to"):
            await Connections("http://127.0.0.1:9", {}, 2.0).request("GET", "/", ())
        async with served(forever) as connections:
            asking = asyncio.ensure_future(connections.request("GET", "/", ()))
            await asyncio.sleep(0.05)
            connections.close()
            with pytest.raises(ConnectionLost):
                await asking
            await asyncio.sleep(0)
            assert connections._open == set()

    asyncio.run(run())
    with pytest.raises(ValueError, match="no http://host:port"):
        Connections("https://somewhere", {}, 2.0)
