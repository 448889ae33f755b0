"""Several engines driven at once, from synchronous code (the trainer's weight sync).

Flows in: `EngineInfo`s. Flows out: per call, the results by engine id. A private thread runs the event loop.
Invariant: an engine that failed a call is set aside with the reason and takes no further calls; the others go on.
Only when none is left does a call raise.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar
from urllib.parse import urlsplit

from slimerl.engine.client import EngineClient, EngineError, EngineRefused
from slimerl.engine.protocol import MemoryTag, PauseMode
from slimerl.samples.messages import EngineInfo

Result = TypeVar("Result")
Call = Callable[[EngineClient], Awaitable[Result]]


class NoEngineLeft(RuntimeError):
    """Every engine of the fleet has failed; the message gives the reason for each."""


class Pending(Generic[Result]):
    """Calls under way to all engines that were left when they were made."""

    def __init__(self, fleet: "EngineFleet", futures: dict[str, Future[Result]]) -> None:
        self._fleet = fleet
        self._futures = futures

    def results(self) -> dict[str, Result]:
        """Wait for all (each call has its own deadline); engines that failed are set aside.

        Raises:
            NoEngineLeft: all have failed.
            What else a call raised, the first of it; only when no engine is at work any more.
        """
        results: dict[str, Result] = {}
        unforeseen: list[BaseException] = []
        for engine_id, future in self._futures.items():
            try:
                results[engine_id] = future.result()
            except EngineError as error:
                self._fleet.set_aside(engine_id, str(error))
            except (Exception, CancelledError) as error:  # noqa: BLE001 (raised below, when all have answered)
                unforeseen.append(error)
        if unforeseen:
            raise unforeseen[0]
        self._fleet.check_some_left()
        return results


class EngineFleet:
    """Use as a context manager, or `close` it."""

    def __init__(
        self, engines: Sequence[EngineInfo], timeout_s: float, pause_mode: PauseMode | str = PauseMode.RETRACT
    ) -> None:
        """`timeout_s` bounds every single call; `pause_mode`: what becomes of requests that run."""
        self._pause_mode = PauseMode(pause_mode)
        self.tensor_parallel = {engine.engine_id: engine.tensor_parallel for engine in engines}
        self.hosts = {engine.engine_id: urlsplit(engine.url).hostname or "" for engine in engines}
        self.failures: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-fleet", daemon=True)
        self._thread.start()
        self._clients = {
            engine.engine_id: EngineClient(engine.engine_id, engine.url, engine.admin_key, timeout_s)
            for engine in engines
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Calls still under way are cancelled."""
        if self._loop.is_closed():
            return
        self._run(self._end_calls()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_calls(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    @property
    def left(self) -> list[str]:
        """Ids of the engines that have not failed."""
        return [engine_id for engine_id in self._clients if engine_id not in self.failures]

    def set_aside(self, engine_id: str, reason: str) -> None:
        """No further calls to this engine; the first reason stays."""
        self.failures.setdefault(engine_id, reason)

    def check_some_left(self) -> None:
        if not self.left:
            reasons = "\n".join(f"  {reason}" for reason in self.failures.values())
            raise NoEngineLeft(f"no engine is left:\n{reasons}" if reasons else "there is no engine to talk to")

    def start(self, call: Call[Result]) -> Pending[Result]:
        """Begin `call` on every engine left, without waiting."""
        self.check_some_left()
        return Pending(self, {engine_id: self._run(_one(call, self._clients[engine_id])) for engine_id in self.left})

    def each(self, call: Call[Result]) -> dict[str, Result]:
        """`call` on every engine left, at once; returns when all have answered or failed."""
        return self.start(call).results()

    def _run(self, coroutine: Coroutine[object, object, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # --- the steps of a weight update, see EngineClient

    def pause(self) -> None:
        self.each(lambda client: client.pause(self._pause_mode))

    def begin_weight_update(self) -> None:
        self.each(lambda client: client.begin_weight_update())

    def end_weight_update(self, version: int | None) -> None:
        self.each(lambda client: client.end_weight_update(version))

    def flush_cache(self) -> None:
        """Where requests were paused in place, engines that have some keep their caches."""
        self.each(_flush_if_idle if self._pause_mode is PauseMode.IN_PLACE else lambda client: client.flush_cache())

    def continue_generation(self) -> None:
        self.each(lambda client: client.continue_generation())

    # --- memory of GPUs that a trainer shares

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.each(lambda client: client.release_memory(tags))

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self.each(lambda client: client.resume_memory(tags))


async def _flush_if_idle(client: EngineClient) -> None:
    # what was cached under older weights is found by no request of the newer ones: each carries its version as a key
    with suppress(EngineRefused):
        await client.flush_cache()


async def _one(call: Call[Result], client: EngineClient) -> Result:
    return await call(client)
