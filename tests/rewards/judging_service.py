"""A judging service for tests: each path misbehaves in its own way, the right ones answer as a verdict or a chat."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

VERDICT = {"reward": 0.75, "correct": True, "note": "unknown keys pass"}


@dataclass
class JudgingService:
    """`/BEHAVIOUR` for the one of that name; `healthy` turns `/ailing` from 503 into a verdict."""

    url: str = ""
    healthy: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    bodies: list[dict] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    votes: Callable[[str], str] = lambda prompt: "Grade: A"
    """Of the chat: prompt → what the judge says."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        behaviour = request.path.strip("/").replace("/", "_")
        self.calls[behaviour] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.tokens.append(request.headers.get("Authorization"))
        try:
            self.bodies.append(await request.json())
            return await getattr(self, f"_{behaviour}")(request)
        finally:
            self.running -= 1

    async def _right(self, _: web.Request) -> web.Response:
        return web.json_response(VERDICT)

    async def _unparsable(self, _: web.Request) -> web.Response:
        return web.json_response({"unparsable": True})

    async def _brief(self, _: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response(VERDICT)

    async def _classify(self, _: web.Request) -> web.Response:
        """As SGLang answers for a model with a scalar head, and below for one with none."""
        return web.json_response({"embedding": [1.5], "meta_info": {"id": "x"}})

    async def _vector_classify(self, _: web.Request) -> web.Response:
        return web.json_response({"embedding": [1.5, 2.5]})

    async def _hangs(self, _: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    async def _late(self, _: web.Request) -> web.Response:
        await asyncio.sleep(1.0)
        return web.json_response(VERDICT)

    async def _trickles(self, request: web.Request) -> web.StreamResponse:
        """Headers at once, then a byte now and then: no single read takes long."""
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    async def _floods(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(2**20))

    async def _garbage(self, _: web.Request) -> web.Response:
        return web.Response(body=b"\xff\x00<html>")

    async def _wrong_type(self, _: web.Request) -> web.Response:
        return web.json_response({"reward": "high", "correct": True})

    async def _half(self, _: web.Request) -> web.Response:
        return web.json_response({"reward": 1.0})

    async def _not_finite(self, _: web.Request) -> web.Response:
        return web.Response(body=b'{"reward": 1e999, "correct": true}')

    async def _drops(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _breaks(self, request: web.Request) -> web.StreamResponse:
        """Goes away in the middle of its answer."""
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"reward"')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _fails(self, _: web.Request) -> web.Response:
        return web.Response(status=500, text="boom")

    async def _busy(self, _: web.Request) -> web.Response:
        return web.Response(status=429)

    async def _refuses(self, _: web.Request) -> web.Response:
        return web.Response(status=422, text="no such field")

    async def _elsewhere(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": str(request.url.with_path("/right"))})

    async def _recovers(self, _: web.Request) -> web.Response:
        return web.Response(status=503) if self.calls["recovers"] < 3 else web.json_response(VERDICT)

    async def _ailing(self, _: web.Request) -> web.Response:
        return web.json_response(VERDICT) if self.healthy else web.Response(status=503)

    async def _v1_chat_completions(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": self.votes(prompt)}}]})


@asynccontextmanager
async def judging_service() -> AsyncIterator[JudgingService]:
    service = JudgingService()
    application = web.Application(client_max_size=2**24)
    application.router.add_post("/{path:.*}", service.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()


def letter_of(prompt: str, grade: str) -> str:
    """The letter that a prompt gives a grade."""
    (line,) = [line for line in prompt.splitlines() if line.endswith(f": {grade}")]
    return line[0]
