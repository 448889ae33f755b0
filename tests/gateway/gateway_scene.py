"""A gateway in this process: real HTTP, sessions, scheduler and dispatcher against fake engines, and a byte tokenizer
whose chat template writes tools and thoughts as the published ones do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import httpx
import openai
from engine_fixtures import RunningEngine
from fake_engine import FakeEngine
from scene import PATIENCE_S, SEED, Scene, rollout
from tiny_models import byte_tokenizer

from slimerl.engine.client import EngineClient
from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.gateway.desk import Desk
from slimerl.rollout.gateway.external import ExternalAgents
from slimerl.rollout.gateway.front import Gateway, listening
from slimerl.rollout.gateway.sampler import TurnSampler
from slimerl.rollout.gateway.sessions import Sessions
from slimerl.rollout.gateway.text import ModelText
from slimerl.rollout.parts import Parts

KEY = "run-key"
END = 3
"""<|im_end|>"""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    # as published templates do: what was thought before the last question is not shown again
    "{% if '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think></think>{% endif %}{% endif %}"
)


@cache
def model_text() -> ModelText:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return ModelText(tokenizer, (1, END))


def ids(text: str) -> list[int]:
    return model_text().encode(text)


def saying(say: Callable[[str, int], str]) -> Callable[[Sequence[int], int], list[int]]:
    """An engine's answer: the text that `say` gives for the prompt's text and the seed, and the end of the turn."""
    text = model_text()
    return lambda prompt, seed: [
        *text.encode(say(text._fast.decode(list(prompt), skip_special_tokens=False), seed)),
        END,
    ]


@dataclass
class Front:
    scene: Scene
    gateway: Gateway
    url: str
    http: aiohttp.ClientSession
    openai_http: openai.DefaultAsyncHttpxClient
    """Of all its clients: each of its own would load certificates."""

    @property
    def external(self) -> ExternalAgents:
        return self.gateway.desk.external

    @property
    def sessions(self) -> Sessions:
        return self.external.sessions

    def client(self, session: str = "", **options: Any) -> openai.AsyncOpenAI:
        key = f"{KEY}:{session}" if session else KEY
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.openai_http, **options
        )

    async def post(self, path: str, body: dict[str, Any], session: str = "", key: str = KEY) -> tuple[int, Any]:
        """Status and JSON."""
        headers = {"Authorization": f"Bearer {key}"} | ({"x-session-id": session} if session else {})
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json() if response.status != 204 else None

    async def take(self, **body: Any) -> dict[str, Any]:
        status, task = await self.post("/v1/sessions", {"wait_s": PATIENCE_S, **body})
        assert status == 200, task
        return task

    def idle(self) -> bool:
        """Nothing is under way anywhere."""
        return not (
            self.gateway.open_requests or self.scene.router.running() or self.scene.scheduler.dispatcher.in_flight
        )


@asynccontextmanager
async def gateway_scene(
    answer: Callable[[Sequence[int], int], list[int]] | None = None,
    silent_s: float = 60.0,
    request_s: float = PATIENCE_S,
    engine_s: float = PATIENCE_S,
    max_new_tokens: int = 2000,
    branch: str = "finished",
    sessions: Sessions | None = None,
    stop_token_ids: tuple[int, ...] = (1, END),
    **options: Any,
) -> AsyncIterator[Front]:
    """Serving version 0; what the scheduler admits are tasks for programs. `request_s`: for a turn; `engine_s`: for an
    engine's answer."""
    async with rollout(max_new_tokens=max_new_tokens, request_s=engine_s, **options) as scene:
        for engine in scene.engines:
            engine.answer = answer or saying(lambda prompt, seed: f"reply {seed % 1000}")
        params = SamplingParams(max_new_tokens, stop_token_ids=stop_token_ids)
        parts = scene.scheduler._maker.parts = Parts(params, SEED, options.get("chunk_tokens"))
        external = ExternalAgents(sessions or Sessions(), silent_s, branch)
        scene.scheduler._maker.agent = external
        sampler = TurnSampler(scene.scheduler.dispatcher, external.sessions, parts, 1000, request_s)
        texts = {(False, f"p{number}"): f"question {number}" for number in range(16)}
        gateway = Gateway(KEY, Desk(external, sampler, model_text(), 1.0, "policy"), texts)
        scene.service.figures = gateway.take_figures
        async with (
            listening(gateway, "127.0.0.1", 0, 0.2) as url,
            aiohttp.ClientSession() as http,
            openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_connections=None)) as openai_http,
        ):
            await scene.serve(0)
            yield Front(scene, gateway, url, http, openai_http)


async def join_real(front: Front, engine: RunningEngine) -> EngineClient:
    """Have a real engine serve version 0."""
    clients, name = front.scene.service.clients, engine.info.engine_id
    clients.add(engine.info)
    front.scene.router.join(engine.info)
    await clients[name].begin_weight_update()
    await clients[name].end_weight_update(0)
    front.scene.router.release(0, [name], {})
    front.scene.scheduler.advance(0)
    return clients[name]


def play(act: Callable[[Front], Any], patience_s: float = 60.0, **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(patience_s), gateway_scene(**options) as front:
            await act(front)

    asyncio.run(run())


def fake_engine_of(front: Front) -> FakeEngine:
    """The only one."""
    (engine,) = front.scene.engines
    return engine
