"""The HTTP clients of the registered engines.

Flows in: `EngineInfo`s as engines register. Flows out: one client for each. Invariant: a client belongs to one
incarnation of an engine; the one of an engine that was replaced is closed once its requests have failed or ended.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slimerl.engine.client import EngineClient
from slimerl.engine.protocol import ANY_VOCABULARY, Generation, SamplingParams
from slimerl.samples.messages import EngineInfo


class Engine(Protocol):
    """What the rollout asks of an engine; `slimerl.engine.client.EngineClient` is one."""

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        timeout_s: float | None,
        extra: Mapping[str, Any] | None,
        told: Callable[[Generation], None] | None = ...,
    ) -> Generation: ...

    async def abort(self, request_id: str | None, *, timeout_s: float | None) -> None: ...

    async def healthy(self, *, timeout_s: float | None) -> bool: ...

    async def weight_version(self, *, timeout_s: float | None) -> int: ...

    async def continue_generation(self, *, timeout_s: float | None) -> None: ...

    async def close(self) -> None: ...


class Engines(Protocol):
    """Engine id → engine."""

    def __getitem__(self, engine_id: str) -> Engine: ...


class EngineClients:
    """Clients by engine id. `vocabulary`: tokens of the model."""

    def __init__(self, timeout_s: float, vocabulary: int = ANY_VOCABULARY) -> None:
        self._timeout_s, self._vocabulary = timeout_s, vocabulary
        self._clients: dict[str, EngineClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __getitem__(self, engine_id: str) -> EngineClient:
        return self._clients[engine_id]

    def add(self, engine: EngineInfo) -> None:
        """Connect to an engine that has registered; the client of an earlier one of its id is closed."""
        replaced = self._clients.get(engine.engine_id)
        if replaced is not None:
            task = asyncio.get_running_loop().create_task(replaced.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._clients[engine.engine_id] = EngineClient(
            engine.engine_id, engine.url, engine.admin_key, self._timeout_s, self._vocabulary
        )

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(client.close() for client in self._clients.values()))
        self._clients.clear()
