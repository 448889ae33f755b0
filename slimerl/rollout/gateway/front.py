"""The gateway over HTTP: OpenAI's chat completions and completions, SGLang's generate, and tasks of agent programs.

Flows in: requests with the gateway's key, each of a session. Flows out: replies, whole or as a stream, each recorded
token by token in its session; errors in OpenAI's shape.

A session is named by the header `x-session-id`, or behind the key: `Authorization: Bearer KEY:SESSION`. What names none
is answered, but not recorded. `POST /v1/sessions` gives a task: one sample of the run, with a session of its own;
`POST /v1/sessions/SESSION/finish` ends it. This module translates; what is decided is decided in the parts it holds.
"""

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from slimerl.rollout.gateway.answers import encode
from slimerl.rollout.gateway.desk import Desk, Order
from slimerl.rollout.gateway.elsewhere import FORWARDED, SESSION_HEADER, Elsewhere, Told
from slimerl.rollout.gateway.errors import ApiError, api_error, refused, unforeseen
from slimerl.rollout.gateway.external import Task
from slimerl.rollout.gateway.hot_path import HotPath
from slimerl.rollout.gateway.requests import (
    ChatBody,
    CompletionBody,
    FinishBody,
    GenerateBody,
    TaskBody,
    cut_generate,
    read_body,
)
from slimerl.rollout.gateway.streaming import BrokenOff, streamed
from slimerl.samples.written_ids import NotPlain

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 2**20
MAX_NAME = 256
"""Characters of a session's name."""
_IN_SESSIONS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})

Given = TypeVar("Given")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Gateway:
    """`texts`: prompts of the data as they were written, by (whether held out, id). `silent_s`: told to programs."""

    key: str
    desk: Desk
    texts: Mapping[tuple[bool, str], str]
    system_prompt: str | None = None
    elsewhere: Elsewhere | None = None
    """Where there are several rollout processes: the others."""
    counts: Counter[str] = field(default_factory=Counter)
    open_requests: int = 0
    stopping: bool = False

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_REQUEST_BYTES)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/generate", self._generate),
                web.post("/v1/sessions", self._take),
                web.post("/v1/sessions/{session}/finish", self._finish),
                web.post("/v1/sessions/{session}/give_back", self._give_back),
            ]
        )
        return application

    def take_figures(self) -> dict[str, float]:
        """`gateway/NAME`: how often it happened since the last call; and how much there is now."""
        external = self.desk.external
        counted = self.counts + external.counts
        if self.elsewhere is not None:
            counted += self.elsewhere.counts
            self.elsewhere.counts.clear()
        counted["sessions_forgotten"] = external.sessions.forgotten
        self.counts.clear()
        external.counts.clear()
        external.sessions.forgotten = 0
        now = {
            "open_sessions": len(external.sessions),
            "open_requests": self.open_requests,
            "tasks_waiting": external.waiting,
            "kept_tokens": external.sessions.tokens,
        }
        return {f"gateway/{name}": float(number) for name, number in {**counted, **now}.items()}

    # --- handlers

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.desk.model, "object": "model", "created": self.desk.created, "owned_by": "slimerl"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), ChatBody)
        return await self._reply(request, await self.desk.chat(self._session(request), body))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await request.read(), CompletionBody)
        return await self._reply(request, await self.desk.completion(self._session(request), body))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body, ids = cut_generate(data)
        name = self._session(request)
        order = self._order(name, body, ids) or await self.desk.generate(name, _whole_body(data, body, ids))
        return await self._reply(request, order)

    async def _take(self, request: web.Request) -> web.Response:
        """Answers with a task, or with 204 where there is none after `wait_s`."""
        body = read_body(await request.read(), TaskBody)
        if self.elsewhere is None or FORWARDED in request.headers:
            told = await self._task(body.wait_s, body.session_id)
        elif body.session_id is not None:
            raise refused(
                "of several rollout processes (rollout.processes) the one that has a task names its session: leave "
                "session_id out, and use the one that the answer has",
                "session_id",
            )
        else:
            told = await self.elsewhere.take(self._task, body.wait_s)
        return web.Response(status=204) if told is None else _json(told)

    async def _task(self, wait_s: float, own_id: str | None = None) -> Told | None:
        task = await self.desk.external.take(wait_s, own_id)
        return None if task is None else self._told(task)

    async def _give_back(self, request: web.Request) -> web.Response:
        """A task that was taken for a program of another gateway, which has gone."""
        self.desk.external.give_back(request.match_info["session"])
        return _json({})

    async def _finish(self, request: web.Request) -> web.Response:
        body = read_body(await request.read(), FinishBody)
        session_id = request.match_info["session"]
        task = self.desk.external.end(session_id, body.reward, body.correct, body.error)
        session = task.session
        return _json({"session_id": session_id, "turns": len(session.turns), "branches": len(session.leaves())})

    def _told(self, task: Task) -> Told:
        prompt = task.prompt
        text = self.texts[task.is_evaluation, prompt.prompt_id]
        messages = [{"role": "user", "content": text}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return {
            "session_id": task.session_id,
            "api_key": f"{self.key}:{task.session_id}",
            "prompt_id": prompt.prompt_id,
            "messages": messages,
            "prompt": text,
            "answer": prompt.answer,
            "evaluation": task.is_evaluation,
            "silent_s": self.desk.external.silent_s,
        }

    # --- replies

    async def _reply(self, request: web.Request, order: Order) -> web.StreamResponse:
        self.open_requests += 1
        self.counts["requests"] += 1
        try:
            if order.answer.wanted.stream:
                return await self._streamed(request, order)
            await self.desk.fill(order, _nobody)
            return _json(order.shape.whole(order.answer))
        finally:
            self.open_requests -= 1

    async def _streamed(self, request: web.Request, order: Order) -> web.StreamResponse:
        try:
            return await streamed(request, order, self.desk.fill)
        except BrokenOff as ended:
            self.counts[f"errors_{ended.name}"] += 1
            return ended.stream

    # --- without the framework

    def at_once(self, authorization: str, session: str, data: bytes) -> Coroutine[Any, Any, tuple[int, bytes]] | None:
        """What `_generate` and its guard do, for `hot_path`: status and body; None: the answer would be a stream."""
        try:
            key, _, named = _credentials(authorization).partition(":")
            self._admit(key)
            name = _checked_name(session or named)
            body, ids = cut_generate(data)
        except ApiError as error:
            return self._refused(error)
        if body.stream:
            return None
        if self.elsewhere is not None and (process := self.elsewhere.home(name)) is not None:
            return self._relayed(self.elsewhere, process, name, data)
        return self._whole(name, data, body, ids)

    async def _whole(self, name: str, data: bytes, body: GenerateBody, ids: bytes | None) -> tuple[int, bytes]:
        given = await self._guarded("/generate", self._generated(name, data, body, ids))
        return self._status(given) if isinstance(given, ApiError) else (200, given)

    async def _relayed(self, elsewhere: Elsewhere, process: int, name: str, data: bytes) -> tuple[int, bytes]:
        self.counts["forwarded"] += 1
        given = await self._guarded("/generate", elsewhere.whole(process, "/generate", name, data))
        return self._status(given) if isinstance(given, ApiError) else given

    async def _generated(self, name: str, data: bytes, body: GenerateBody, ids: bytes | None) -> bytes:
        order = self._order(name, body, ids) or await self.desk.generate(name, _whole_body(data, body, ids))
        self.open_requests += 1
        self.counts["requests"] += 1
        try:
            await self.desk.fill(order, _nobody)
            return encode(order.shape.whole(order.answer))
        finally:
            self.open_requests -= 1

    def _order(self, name: str, body: GenerateBody, ids: bytes | None) -> Order | None:
        """None: there are no ids, or they are not as simple as they looked."""
        if ids is None:
            return None
        try:
            return self.desk.generate_from(name, body, ids)
        except NotPlain:
            return None

    async def _refused(self, error: ApiError) -> tuple[int, bytes]:
        return self._status(error)

    def _status(self, error: ApiError) -> tuple[int, bytes]:
        self.counts[f"errors_{error.name}"] += 1
        return error.status, encode(error.body())

    # --- who asks

    def _session(self, request: web.Request) -> str:
        """Name of the request's session; empty: none. Raises ApiError."""
        return _checked_name(request.headers.get(SESSION_HEADER) or _bearer(request).partition(":")[2])

    def _admit(self, key: str) -> None:
        """Raises ApiError."""
        # headers keep bytes that are no UTF-8 as halves of surrogate pairs
        if not hmac.compare_digest(key.encode(errors="surrogateescape"), self.key.encode()):
            raise ApiError(401, "invalid_api_key", "the key is missing or wrong; it stands in the run's gateway.json")
        if self.stopping:
            raise ApiError(503, "shutting_down", "the run is ending")

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The key first; then every error takes OpenAI's shape, and is counted under its name."""
        try:
            if request.path != "/health":
                self._admit(_bearer(request).partition(":")[0])
            answering = self._answering(request, handler)
        except ApiError as error:
            return self._failed(error)
        given = await self._guarded(f"{request.method} {request.path}", answering)
        return self._failed(given) if isinstance(given, ApiError) else given

    def _answering(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        """By the process that has the request's session. Raises ApiError."""
        if self.elsewhere is None:
            return handler(request)
        in_session = request.path in _IN_SESSIONS
        process = self.elsewhere.home(self._session(request) if in_session else request.match_info.get("session", ""))
        return handler(request) if process is None else self._forwarded(self.elsewhere.forwarded(process, request))

    async def _forwarded(self, forwarding: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        self.counts["forwarded"] += 1
        try:
            return await forwarding
        except BrokenOff as ended:
            self.counts[f"errors_{ended.name}"] += 1
            return ended.stream

    async def _guarded(self, what: str, answering: Awaitable[Given]) -> Given | ApiError:
        try:
            return await answering
        except web.HTTPException as error:
            name = "unknown_path" if error.status in (404, 405) else "refused"
            return ApiError(error.status, name, f"{what}: {error}")
        except ConnectionError:
            self.counts["disconnected"] += 1
            raise
        except Exception as error:
            failure = api_error(error)
            if failure is None:
                logger.error("%s: an unexpected error", what, exc_info=error)
                failure = unforeseen(error)
            return failure
        except BaseException:
            # cancelled: the client has gone
            self.counts["disconnected"] += 1
            raise

    def _failed(self, error: ApiError) -> web.Response:
        status, body = self._status(error)
        return web.Response(status=status, body=body, content_type="application/json")


def _bearer(request: web.Request) -> str:
    return _credentials(request.headers.get("Authorization", ""))


def _credentials(authorization: str) -> str:
    kind, _, value = authorization.partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _checked_name(session: str) -> str:
    """Raises ApiError."""
    if len(session) > MAX_NAME:
        raise ApiError(400, "invalid_session", f"a session's name has at most {MAX_NAME} characters")
    try:
        session.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "invalid_session", "a session's name is text, and this is no UTF-8") from None
    return session


def _whole_body(data: bytes, body: GenerateBody, ids: bytes | None) -> GenerateBody:
    """Where `ids` were cut out of it, it is read again with them."""
    return body if ids is None else read_body(data, GenerateBody)


def _nobody() -> None:
    """Nobody reads along."""


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=encode(body), content_type="application/json")


@asynccontextmanager
async def listening(gateway: Gateway, host: str, port: int, grace_s: float) -> AsyncIterator[str]:
    """Serve while the context lasts; gives the URL.

    A client that goes cancels its handler, and with it all that was done for it.
    """
    runner = web.AppRunner(gateway.application(), access_log=None, shutdown_timeout=grace_s, handler_cancellation=True)
    await runner.setup()
    if runner.server is None:
        raise RuntimeError("aiohttp's runner has no server after its setup")
    hot = HotPath(gateway.at_once, runner.server, MAX_REQUEST_BYTES)
    try:
        server = await asyncio.get_running_loop().create_server(hot.connection, host, port, backlog=4096)
        try:
            yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            gateway.stopping = True
            server.close()
    finally:
        gateway.stopping = True
        await asyncio.gather(hot.close(grace_s), runner.cleanup())
