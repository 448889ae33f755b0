"""A server that speaks the part of SGLang's HTTP protocol which the rollout role and the trainer use.

It computes nothing: the tokens of a request are a pure function of its prompt and seed. Delays, faults and broken
connections are injected per request. For tests of routing, scheduling and failure only.
"""

import asyncio
import base64
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from slimerl.samples.messages import EngineInfo

KEY = "fake-key"
VOCABULARY = 100
STOP = 2

Answer = Callable[[Sequence[int], int], list[int]]


def hashed_tokens(prompt: Sequence[int], seed: int) -> list[int]:
    """Between 1 and 12 tokens, ended by `STOP`: a pure function of prompt and seed."""
    digest = hashlib.blake2b(repr((tuple(prompt), seed)).encode()).digest()
    return [3 + byte % (VOCABULARY - 3) for byte in digest[1 : 1 + digest[0] % 12]] + [STOP]


compact = partial(json.dumps, separators=(",", ":"))
"""As SGLang writes JSON."""
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
LONG = 12
"""Tokens of every sample that `go_on` answers."""


def go_on(tokens: Sequence[int], seed: int) -> list[int]:
    """As of an engine whose draws are keyed by position: the rest of what one request would have given. The prompt has
    two tokens."""
    return [3 + (31 * tokens[1] + seed + at) % 90 for at in range(len(tokens) - 2, LONG)]


class FakeEngine:
    """`faults` are used up one per request: "500", "400", "drop", "hang", "abort", "empty", "garbage"."""

    def __init__(self, engine_id: str = "engine-0", answer: Answer = hashed_tokens) -> None:
        self.engine_id = engine_id
        self.answer = answer
        self.logprob: Callable[[int], float] = lambda token: -0.5 - token / 1000
        self.faults: deque[str] = deque()
        self.delay_s = 0.0
        self.open = asyncio.Event()
        """While cleared, requests wait before they are answered."""
        self.open.set()
        self.stopped_at: int | None = None
        """Requests with so many input tokens wait, too ..."""
        self.stops: Callable[[list[int]], bool] = lambda tokens: False
        """... and those with such input tokens, until `let_go`."""
        self._let_go = asyncio.Event()
        self.waiting: list[dict[str, Any]] = []
        self._cut = asyncio.Event()
        """Requests that wait end with half of their tokens."""
        self.healthy = True
        self.version = "default"
        self.paused = False
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.calls: Counter[str] = Counter()
        self.memory: set[str] = {"kv_cache", "weights"}
        self.refusing: set[str] = set()
        """Paths whose calls fail from now on."""
        self.called: Callable[[str], None] = lambda path: None
        """Told the path of every call, and of which memory."""
        self.extra_meta: dict[str, Any] = {}
        """Told with every answer."""
        self.cached: deque[int] = deque()
        """Tokens of the prompt that were cached, told by one answer with tokens each."""
        self.streams_stop_at: int | None = None
        """Streams wait when they have so many tokens, until `let_go` or a pause that aborts ..."""
        self.stream_fault = ""
        """... or end there by a fault: "drop", "error"."""
        self.cumulative = False
        """Events of a stream hold all that there is so far."""
        self.running = 0
        self.most_running = 0
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "FakeEngine":
        application = web.Application(middlewares=[self._authorized], client_max_size=2**26)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._accept),
                web.post("/begin_weight_update", self._accept),
                web.post("/end_weight_update", self._accept),
                web.post("/update_weight_version", self._set_version),
                web.post("/release_memory_occupation", self._release),
                web.post("/resume_memory_occupation", self._resume),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the port and every connection, answered or not."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        assert self._runner is not None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.engine_id, self.url, KEY, 1)

    async def running_requests(self, count: int) -> None:
        """Wait until exactly so many requests are in the engine."""
        async with asyncio.timeout(10):
            while self.running != count:
                self._changed.clear()
                await self._changed.wait()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        self.calls[request.path] += 1
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "unauthorized"}}, status=401)
        tags = (await request.json()).get("tags", []) if request.path.endswith("_memory_occupation") else []
        said = " ".join([request.path, *tags])
        self.called(said)
        if {request.path, said} & self.refusing:
            return web.json_response({"error": {"message": f"injected: {said}"}}, status=500)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else ""
        self._run(1)
        try:
            begun_with = self.version
            await asyncio.sleep(self.delay_s)
            fault = await self._waited(body) or fault
            return await self._answered(request, body, fault, begun_with)
        finally:
            self._run(-1)

    async def _waited(self, body: dict[str, Any], always: bool = False) -> str:
        """Returns "cut" where a pause ended it."""
        tokens = body["input_ids"]
        if not always and self.open.is_set() and len(tokens) != self.stopped_at and not self.stops(tokens):
            return ""
        self.waiting.append(body)
        waits = [asyncio.ensure_future(event.wait()) for event in (self._cut, self._let_go, self.open)]
        try:
            await asyncio.wait(waits[:2] if self.open.is_set() else waits, return_when=asyncio.FIRST_COMPLETED)
            return "cut" if self._cut.is_set() else ""
        finally:
            self.waiting.remove(body)
            for wait in waits:
                wait.cancel()

    def let_go(self) -> None:
        """Whatever waits by `stopped_at` or `stops` goes on, and nothing will wait by these any more."""
        self.stopped_at = self.streams_stop_at = None
        self.stops = lambda tokens: False
        self._let_go.set()

    def _run(self, change: int) -> None:
        self.running += change
        self.most_running = max(self.most_running, self.running)
        self._changed.set()

    async def _answered(
        self, request: web.Request, body: dict[str, Any], fault: str, begun_with: str
    ) -> web.StreamResponse:
        if fault in ("500", "503", "400", "429"):
            return web.json_response({"error": {"message": f"injected {fault}"}}, status=int(fault))
        if fault == "drop":
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            while body["rid"] not in self.aborted:
                await asyncio.sleep(0.01)
        if fault == "garbage":
            return web.json_response({"output_ids": [1, 2, 3]})
        params = body["sampling_params"]
        tokens = self.answer(body["input_ids"], params.get("sampling_seed", 0))
        finish: dict[str, Any] = {"type": "stop", "matched": STOP}
        if len(tokens) > params["max_new_tokens"]:
            tokens = tokens[: params["max_new_tokens"]]
            finish = {"type": "length", "length": len(tokens)}
        if fault in ("abort", "hang"):
            finish = {"type": "abort", "message": "Aborted"}
        if fault == "empty":
            tokens = []
        if fault == "cut":
            tokens, finish = tokens[: len(tokens) // 2], {"type": "abort", "message": "Aborted"}
        if body["stream"]:
            return await self._streamed(request, body, tokens, finish)
        # where the weights have changed meanwhile, half of the tokens were there before
        half = 0 if begun_with == self.version else len(tokens) // 2
        spans = [
            {"version": version, "start": start, "end": end}
            for version, start, end in ((begun_with, 0, half), (self.version, half, len(tokens)))
            if end > start
        ]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[self.logprob(token), token, None] for token in tokens],
            "weight_version": self.version,
            "weight_versions": spans,
            **self.extra_meta,
        }
        if tokens and self.cached:
            meta["cached_tokens"] = self.cached.popleft()
        if body.get("return_routed_experts"):
            meta["routed_experts"] = self._routed(body["routed_experts_start_len"], len(body["input_ids"] + tokens))
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta}, dumps=compact)

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], tokens: list[int], finish: dict[str, Any]
    ) -> web.StreamResponse:
        """An event for each token, with the weights of its moment."""
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        versions: list[str] = []

        async def tell(event: dict[str, Any]) -> None:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        for told in range(len(tokens)):
            if told == self.streams_stop_at:
                if self.stream_fault == "drop":
                    request.transport.abort()
                    return stream
                if self.stream_fault == "error":
                    await tell({"error": {"message": "injected in a stream", "code": 500}})
                    return stream
                if await self._waited(body, always=True) == "cut":
                    # as SGLang does, with the last id once more and all logprobs
                    aborted = self._event(body, tokens[:told], versions, ABORTED)
                    await tell({**aborted, "output_ids": tokens[:told][-1:]})
                    break
            versions.append(self.version)
            ended = finish if told + 1 == len(tokens) else None
            await tell(self._event(body, tokens[: told + 1], versions, ended, 0 if self.cumulative else told))
        if not tokens:
            await tell(self._event(body, [], [], finish))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def _event(
        self,
        body: dict[str, Any],
        tokens: list[int],
        versions: list[str],
        finish: dict[str, Any] | None,
        start: int = 0,
    ) -> dict[str, Any]:
        """Of so many tokens; those from `start` on are listed."""
        places = [at for at in range(len(versions)) if not at or versions[at] != versions[at - 1]]
        spans = [
            {"version": versions[at], "start": at, "end": end}
            for at, end in zip(places, [*places[1:], len(versions)], strict=True)
        ]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[self.logprob(token), token, None] for token in tokens[start:]],
            "weight_version": self.version,
            "weight_versions": spans,
            **self.extra_meta,
        }
        return {"text": "", "output_ids": tokens[start:], "meta_info": meta}

    def _routed(self, first: int, tokens: int) -> str:
        """Two for each token: its place, and the version that computes it."""
        rows = [[place, int(self.version)] for place in range(first, tokens - 1)]
        return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborted.append(body.get("rid", ""))
        return web.json_response({})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        if (await request.json())["mode"] == "abort":
            self._cut.set()
        return web.json_response({})

    async def _continue(self, _: web.Request) -> web.Response:
        if self.memory != {"kv_cache", "weights"}:
            return web.json_response({"error": {"message": f"has no memory but {self.memory}"}}, status=500)
        self.paused = False
        self._cut.clear()
        return web.json_response({})

    async def _release(self, request: web.Request) -> web.Response:
        """Where SGLang's scheduler would end, this one refuses."""
        tags = set((await request.json())["tags"])
        if not self.paused or not tags <= self.memory:
            return web.json_response({"error": {"message": f"{tags} of {self.memory}, not idle"}}, status=500)
        self.memory -= tags
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        if tags & self.memory:
            return web.json_response({"error": {"message": f"{tags} was not released"}}, status=500)
        self.memory |= tags
        return web.json_response({})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _accept(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})
