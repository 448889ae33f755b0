"""What tools/bench_gateway.py and tools/bench_router_http.py load: one server in a process of its own.

    python tools/bench_gateway_server.py generate --urls http://127.0.0.1:30000    # prints its URL, then serves

`generate` and the chats are the gateway, whole, before engines that serve version 0; the other rows are what HTTP alone
takes. Ended by SIGTERM.
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from bench_passthrough import serve_raw
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
REQUEST_S = 120.0
VOCABULARY = 260
"""Of the byte tokenizer that serves where no model is given."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RAW = "raw pass-through"
ROWS = ("bare handler", "pass-through", RAW, "generate", "chat", "chat, streamed")


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
def server(row: str, urls: Sequence[str], model: str = "", new_tokens: int = 32) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    command = [sys.executable, __file__, row, "--model", model, "--new", str(new_tokens)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--urls", nargs="*", default=[], help="of engines")
    parser.add_argument("--model", default="", help="directory of a tokenizer with a chat template")
    parser.add_argument("--new", type=int, default=32, help="tokens of the bare handler's reply")
    options = parser.parse_args()
    if options.row == RAW:
        uvloop.run(serve_raw(options.urls))
    elif options.row in ROWS[:2]:
        uvloop.run(serve_plain(options.urls, options.new))
    else:
        uvloop.run(serve_gateway(options.model, options.urls))


if __name__ == "__main__":
    main()
