"""CPU time of the gateway per request, beside what HTTP alone takes on this machine.

    python tools/bench_gateway.py                          # a byte tokenizer
    python tools/bench_gateway.py --model assets/smollm2/model

Conversations of several turns, each a session, so many at once, on mock engines in another process. Each server runs in
a process of its own; its CPU time is what the operating system counted. Rows:

    bare handler     aiohttp with uvloop reads a body and answers with one of the same size as an engine's
    pass-through     the same, and hands the body on to an engine and its answer back
    generate         the gateway, whole: SGLang's /generate with ids, keyed by session
    chat             the gateway, whole: chat completions, with template and tokenizer
    chat, streamed   the same for clients that read along: engines send each token by itself
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from bench_router_http import cpu_s, mock_engines, spread_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.full_collections import defer_full_collections
from slimerl.rollout.gateway.desk import Desk
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.front import Gateway, listening
from slimerl.rollout.gateway.sampler import TurnSampler
from slimerl.rollout.gateway.sessions import Sessions
from slimerl.rollout.gateway.text import ModelText
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.parts import Parts
from slimerl.samples.messages import EngineInfo

KEY = "bench"
VOCABULARY = 260
REQUEST_S = 120.0
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = ("bare handler", "pass-through", "generate", "chat", "chat, streamed")


# --- servers


def model_text(model: str) -> ModelText:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if model:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        return ModelText(tokenizer, (tokenizer.eos_token_id,))
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    plain = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    tokenizer.chat_template = CHATML
    return ModelText(tokenizer, (0, 2))


async def serve_gateway(model: str, urls: list[str]) -> None:
    router = KvRouter(1 << 30)
    clients = EngineClients(REQUEST_S)
    for number, url in enumerate(urls):
        info = EngineInfo(str(number), url, "", 1)
        clients.add(info)
        router.join(info)
    router.release(0, [str(number) for number in range(len(urls))], {})
    external = ExternalAgents(Sessions(), REQUEST_S)
    parts = Parts(SamplingParams(1 << 20), 0)
    sampler = TurnSampler(Dispatcher(router, clients, REQUEST_S), external.sessions, parts, 1 << 20, REQUEST_S)
    gateway = Gateway(KEY, Desk(external, sampler, model_text(model), 1.0, "bench"), {})
    async with listening(gateway, "127.0.0.1", 0, 0.1) as url:
        defer_full_collections()
        print(url, flush=True)
        await asyncio.Event().wait()


async def serve_plain(urls: list[str], new_tokens: int) -> None:
    """`urls`: hands bodies on to them in turn; none: answers by itself."""
    ids = list(range(new_tokens))
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, each, None] for each in ids]}
    answer = msgspec.json.encode({"output_ids": ids, "meta_info": meta})
    turns = itertools.cycle(urls)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        if not urls:
            return web.Response(body=answer, content_type="application/json")
        async with session.post(f"{next(turns)}/generate", data=body) as response:
            return web.Response(body=await response.read(), content_type="application/json")

    application = web.Application(client_max_size=1 << 26)
    application.add_routes([web.post("/generate", handle)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def server(row: str, options: argparse.Namespace, urls: list[str]) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    command = [sys.executable, __file__, "--serve", row, "--model", options.model, "--new", str(options.new)]
    process = subprocess.Popen(
        [*command, "--urls", *urls], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    try:
        url = process.stdout.readline().strip() if process.stdout else ""
        if not url:
            raise RuntimeError(f"the server of row '{row}' ended with {process.wait()} before it was ready")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


# --- load


class Load:
    """`turns` requests for each conversation, each with what came before."""

    def __init__(self, http: aiohttp.ClientSession, url: str, options: argparse.Namespace) -> None:
        self.http, self.url, self.options = http, url, options
        self.waits_s: list[float] = []

    async def run(self, row: str, conversations: range) -> None:
        waiting = iter(conversations)
        converse = {"chat": self._chat, "chat, streamed": self._chat_streamed}.get(row, self._generate)

        async def worker() -> None:
            for number in waiting:
                await converse(number)

        await asyncio.gather(*(worker() for _ in range(self.options.concurrency)))

    async def _generate(self, number: int) -> None:
        ids = [each % VOCABULARY for each in spread_ids(f"{number}", self.options.prompt)]
        for _ in range(self.options.turns):
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": self.options.new, "ignore_eos": True}}
            ids += (await self._post("/generate", body, number))["output_ids"]
            ids += [each % VOCABULARY for each in spread_ids("seen", 20)]

    async def _chat(self, number: int) -> None:
        messages = [{"role": "user", "content": f"{number} " + "How many? " * (self.options.prompt // 10)}]
        for _ in range(self.options.turns):
            body = {"messages": messages, "max_tokens": self.options.new}
            answer = await self._post("/v1/chat/completions", body, number)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Are you sure of it?"}]

    async def _chat_streamed(self, number: int) -> None:
        messages = [{"role": "user", "content": f"{number} " + "How many? " * (self.options.prompt // 10)}]
        for _ in range(self.options.turns):
            body = {"messages": messages, "max_tokens": self.options.new, "stream": True}
            events = (await self._post("/v1/chat/completions", body, number)).decode().split("\n\n")
            chunks = [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-2]]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure of it?"}]

    async def _post(self, path: str, body: dict[str, Any], number: int) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "x-session-id": f"s{number}", "content-type": "application/json"}
        begun = time.perf_counter()
        async with self.http.post(self.url + path, data=msgspec.json.encode(body), headers=headers) as response:
            data = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{path} answered {response.status}: {data[:300]!r}")
        self.waits_s.append(time.perf_counter() - begun)
        return data if body.get("stream") else msgspec.json.decode(data)


async def measure(row: str, url: str, pid: int, options: argparse.Namespace) -> tuple[float, float]:
    """CPU microseconds per request, and milliseconds from a request to its answer (median)."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        load = Load(http, url, options)
        await load.run(row, range(options.concurrency))  # connections, imports, caches
        load.waits_s.clear()
        before = cpu_s(pid)
        await load.run(row, range(options.concurrency, options.concurrency + options.conversations))
        spent = cpu_s(pid) - before
    return spent / len(load.waits_s) * 1e6, statistics.median(load.waits_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory of a tokenizer with a chat template")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens (generate), characters (chat)")
    parser.add_argument("--new", type=int, default=32, help="tokens of a reply")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--urls", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        plain = options.serve in ROWS[:2]
        serving = serve_plain(options.urls, options.new) if plain else serve_gateway(options.model, options.urls)
        uvloop.run(serving)
        return
    requests = options.conversations * options.turns
    print(f"{requests} requests, {options.concurrency} at once, {options.repeat} times; CPU us per request")
    with mock_engines(4, 0.0, "--vocabulary", str(VOCABULARY)) as urls:
        for row in ROWS:
            if options.only not in row:
                continue
            found = []
            for _ in range(options.repeat):
                with server(row, options, urls if row != ROWS[0] else []) as (url, pid):
                    found.append(uvloop.run(measure(row, url, pid, options)))
            cpu = [each for each, _ in found]
            wait = statistics.median(each for _, each in found)
            print(
                f"{row:<16}{min(cpu):>8.0f}{statistics.median(cpu):>8.0f}    answered after {wait:.1f} ms", flush=True
            )


if __name__ == "__main__":
    main()
