"""Mock engines in a process of their own: SGLang's `/generate`, a real prefix cache, delays, no model.

    python tools/bench_router_mock.py --engines 8 --time-scale 0.02    # prints the engines' URLs, then `ready`

Each engine answers after (missing prompt tokens / prefill rate + new tokens * step) * time scale and counts what it
found cached. An oracle counts the same for one endless cache that sees every request: `GET /mock/counts` of any engine
returns all engines' counts and the oracle's, `POST /mock/reset` empties counts and caches.
Where a prompt is text, it is the ids written out with spaces, so that routers which look at text alone can be compared.
"""

import argparse
import asyncio
import logging
import signal
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

BLOCK_TOKENS = 16
PREFILL_TOKENS_PER_S = 15_000.0
STEP_S = 0.01
INFO = {
    "model_path": "mock",
    "served_model_name": "mock",
    "tokenizer_path": "",
    "is_generation": True,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_running_requests": 64,
    "dp_size": 1,
    "tp_size": 1,
    "version": "0.5.23",
    "weight_version": "0",
    "internal_states": [{"memory_usage": {"kvcache": 1}}],
}
"""What routers read of an engine before they take it."""


@dataclass
class MockCache:
    """Blocks of prompts and answers, the least recently used forgotten beyond `blocks`."""

    blocks: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    _held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def request(self, keys: list[int], tokens: int) -> int:
        """Count a prompt, and cache it; returns its missing tokens."""
        found = 0
        for key in keys:
            if key not in self._held:
                break
            found += 1
        self.requests += 1
        self.prompt_tokens += tokens
        self.cached_tokens += found * BLOCK_TOKENS
        self.keep(keys)
        return tokens - found * BLOCK_TOKENS

    def keep(self, keys: list[int]) -> None:
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self.blocks:
            self._held.popitem(last=False)

    def counts(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def reset(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.requests = 0
        self._held.clear()


class MockEngines:
    """All engines of one process."""

    def __init__(self, engines: int, blocks: int, time_scale: float, vocabulary: int) -> None:
        self.caches = [MockCache(blocks) for _ in range(engines)]
        self.oracle = MockCache(1 << 40)
        self.time_scale = time_scale
        self.vocabulary = vocabulary

    def app(self, number: int) -> web.Application:
        """The endpoints of one engine: those that routers ask before they take a worker, and /generate."""
        cache = self.caches[number]

        async def generate(request: web.Request) -> web.StreamResponse:
            body = msgspec.json.decode(await request.read())
            answer = await self._generate(cache, body)
            return await _streamed(request, answer) if body.get("stream") else _json(answer)

        async def counts(_: web.Request) -> web.Response:
            return _json({"engines": [one.counts() for one in self.caches], "oracle": self.oracle.counts()})

        async def reset(_: web.Request) -> web.Response:
            for one in (*self.caches, self.oracle):
                one.reset()
            return _json({})

        async def fine(_: web.Request) -> web.Response:
            return web.Response(text="ok")

        async def info(_: web.Request) -> web.Response:
            return _json(INFO)

        async def models(_: web.Request) -> web.Response:
            return _json({"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]})

        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/generate", generate),
                web.get("/mock/counts", counts),
                web.post("/mock/reset", reset),
                web.get("/health", fine),
                web.get("/health_generate", fine),
                web.get("/v1/models", models),
                *(
                    web.get(path, info)
                    for path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info")
                ),
            ]
        )
        return app

    async def _generate(self, cache: MockCache, body: dict[str, Any]) -> dict[str, Any]:
        ids = body.get("input_ids") or [int(word) for word in body["text"].split()]
        new = int(body["sampling_params"]["max_new_tokens"])
        tokens = tuple(ids)
        keys = block_keys(tokens)
        self.oracle.request(keys, len(tokens))
        missing = cache.request(keys, len(tokens))
        await asyncio.sleep(self.time_scale * (missing / PREFILL_TOKENS_PER_S + new * STEP_S))
        first = hash(tokens[-8:]) % 100_000
        answer = tuple((first + position) % self.vocabulary for position in range(new))
        whole = block_keys(tokens + answer)
        cache.keep(whole)
        self.oracle.keep(whole)
        meta = {
            "id": body.get("rid", "mock"),
            "finish_reason": {"type": "length", "length": new},
            "prompt_tokens": len(tokens),
            "completion_tokens": new,
            "cached_tokens": len(tokens) - missing,
            "weight_version": "0",
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in answer]
        return {"text": " ".join(map(str, answer)), "output_ids": answer, "meta_info": meta}


def block_keys(tokens: tuple[int, ...]) -> list[int]:
    keys, key = [], 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tokens[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """An event for each token, with what is new."""
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    meta, count = answer["meta_info"], len(answer["output_ids"])
    for place, token in enumerate(answer["output_ids"], 1):
        finish = meta["finish_reason"] if place == count else None
        pairs = meta.get("output_token_logprobs", [])[place - 1 : place]
        new = {**meta, "finish_reason": finish, "completion_tokens": place, "output_token_logprobs": pairs}
        event = msgspec.json.encode({"text": "", "output_ids": [token], "meta_info": new})
        await stream.write(b"data: " + event + b"\n\n")
    await stream.write(b"data: [DONE]\n\n")
    return stream


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def serve(engines: int, blocks: int, time_scale: float, vocabulary: int) -> None:
    """Until SIGTERM, or until the parent closes standard input."""
    # Some routers probe for gRPC first, which is no HTTP/1 request.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    fleet = MockEngines(engines, blocks, time_scale, vocabulary)
    for number in range(engines):
        runner = web.AppRunner(fleet.app(number), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    print("ready", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=25_000, help=f"blocks of {BLOCK_TOKENS} tokens per engine")
    parser.add_argument("--time-scale", type=float, default=0.02)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    options = parser.parse_args()
    uvloop.run(serve(options.engines, options.blocks, options.time_scale, options.vocabulary))


if __name__ == "__main__":
    main()
