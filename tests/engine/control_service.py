"""The engines' door of the rollout role's control service, speaking the real messages."""

import asyncio
import threading
from pathlib import Path
from typing import Self

import msgspec
from aiohttp import web

from slimerl.samples import messages
from slimerl.samples.messages import ADDRESS_FILE, TOKEN_HEADER, EngineInfo, Refusal, ServiceAddress

TOKEN = "token-of-the-test"


class ControlService:
    """Listens while the context lasts; `registered` are the engines that it has taken."""

    def __init__(self, run_dir: Path, refuse: str | None = None, token: str = TOKEN) -> None:
        self._run_dir = run_dir
        self._refuse = refuse
        self._token = token
        self.registered: list[EngineInfo] = []
        self.attempts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_post(messages.Path.REGISTER_ENGINE, self._register)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        address = ServiceAddress(f"http://127.0.0.1:{port}", self._token, 1)
        (self._run_dir / ADDRESS_FILE).write_bytes(msgspec.json.encode(address))

    async def _register(self, request: web.Request) -> web.Response:
        self.attempts += 1
        assert request.headers[TOKEN_HEADER] == self._token
        info = messages.decode(await request.read(), EngineInfo)
        if self._refuse is not None:
            return web.Response(status=409, body=messages.encode(Refusal(self._refuse)))
        self.registered.append(info)
        return web.Response()
