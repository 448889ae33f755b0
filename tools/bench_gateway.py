"""CPU time of the gateway per request, beside what HTTP alone takes on this machine.

    python tools/bench_gateway.py                          # a byte tokenizer
    python tools/bench_gateway.py --model assets/smollm2/model

Conversations of several turns, each a session, so many at once, on mock engines in another process. Each server runs in
a process of its own; its CPU time is what the operating system counted. Rows:

    bare handler     aiohttp with uvloop reads a body and answers with one of the same size as an engine's
    pass-through     the same, and hands the body on to an engine and its answer back
    raw pass-through the same without a web framework, bodies unread: what sockets take
    generate         the gateway, whole: SGLang's /generate with ids, keyed by session
    chat             the gateway, whole: chat completions, with template and tokenizer
    chat, streamed   the same for clients that read along: engines send each token by itself
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import aiohttp
import msgspec
import uvloop
from bench_gateway_server import KEY, REQUEST_S, ROWS, VOCABULARY, server
from bench_router_http import cpu_s, mock_engines, spread_ids

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
    options = parser.parse_args()
    requests = options.conversations * options.turns
    print(f"{requests} requests, {options.concurrency} at once, {options.repeat} times; CPU us per request")
    with mock_engines(4, 0.0, "--vocabulary", str(VOCABULARY)) as urls:
        for row in ROWS:
            if options.only not in row:
                continue
            found = []
            for _ in range(options.repeat):
                with server(row, urls if row != ROWS[0] else [], options.model, options.new) as (url, pid):
                    found.append(uvloop.run(measure(row, url, pid, options)))
            cpu = [each for each, _ in found]
            wait = statistics.median(each for _, each in found)
            print(
                f"{row:<18}{min(cpu):>8.0f}{statistics.median(cpu):>8.0f}    answered after {wait:.1f} ms", flush=True
            )


if __name__ == "__main__":
    main()
