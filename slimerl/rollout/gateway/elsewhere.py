"""Sessions and tasks of the other rollout processes of a run: an agent program may talk to any of their gateways.

Flows in: requests of sessions that another process has, programs that wait for a task. Flows out: the other's answer as
it gave it, whole or as a stream; a task of whichever process has one that nobody there waits for.
Invariants: every process says the same of where a session is (`shares.py`), so that nothing is forwarded twice; where
the other does not answer the client is told so, and that its session may be gone with it; a task of another process
whose program has gone meanwhile is given back.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.gateway.errors import ApiError
from slimerl.rollout.gateway.streaming import STREAM, relayed
from slimerl.rollout.shares import shard_of_session
from slimerl.samples.messages import address_in, gateway_file

FORWARDED = "x-slimerl-forwarded"
"""Header of what one gateway asks another: it is answered there."""
SESSION_HEADER = "x-session-id"
CONNECT_S = 5.0
LOOK_S = 0.5
"""From one look for a task elsewhere to the next, while a program waits."""
TASK_S = 10.0
"""For another process to say whether it has one."""
_PASSED = ("Authorization", SESSION_HEADER, "Content-Type")

Told = dict[str, Any]
"""A task, as a program is told of it."""


@dataclass
class Elsewhere:
    """`close` it.

    Args of the constructor:
        process, processes: which one this is, of how many.
        key: of all gateways of the run.
        answer_s: for the next bytes of an answer; as long as a turn may take.
    """

    process: int
    processes: int
    run_dir: Path
    key: str
    answer_s: float
    counts: Counter[str] = field(default_factory=Counter)
    _http: aiohttp.ClientSession | None = None
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _returning: "set[asyncio.Task[None]]" = field(default_factory=set)

    def home(self, session: str) -> int | None:
        """The process that has a session; None: this one, also of what is in none (empty)."""
        if not session:
            return None
        process = shard_of_session(session, self.processes)
        return None if process == self.process else process

    async def forwarded(self, process: int, request: web.Request) -> web.StreamResponse:
        """Raises ApiError: the process does not answer; BrokenOff: it did, and its stream broke off."""
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        data = await request.read()
        async with await self._asked(process, request.path_qs, data, headers) as answer:
            if answer.content_type == STREAM:
                return await relayed(request, lambda: self._next(process, answer))
            body = await self._body(process, answer)
            return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    async def whole(self, process: int, path: str, session: str, data: bytes) -> tuple[int, bytes]:
        """Status and body of what is no stream. Raises ApiError: the process does not answer."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", SESSION_HEADER: session}
        async with await self._asked(process, path, data, headers) as answer:
            return answer.status, await self._body(process, answer)

    # --- tasks

    async def take(self, own: Callable[[float], Awaitable[Told | None]], wait_s: float) -> Told | None:
        """A task; None: no process had one for so long. Args: `own`: a task of this process, within some seconds."""
        deadline = Deadline("a task for an agent program", wait_s)
        while True:
            if (told := await own(0.0)) is not None:
                return told
            # one program looks for all: the others wait here, where the next task may be
            if not self._asking.locked():
                async with self._asking:
                    if (told := await self._surplus()) is not None:
                        return told
            left_s = deadline.remaining_s
            if (told := await own(min(left_s, LOOK_S))) is not None or not left_s:
                return told

    async def _surplus(self) -> Told | None:
        """A task that no program waits for where it is."""
        for turn in range(1, self.processes):
            process = (self.process + turn) % self.processes
            asking = asyncio.ensure_future(self._task_of(process))
            try:
                told = await asyncio.shield(asking)
            except ApiError:
                self.counts["process_away"] += 1
                continue
            except asyncio.CancelledError:
                self._later(self._give_back(process, asking))
                raise
            if told is not None:
                self.counts["tasks_from_elsewhere"] += 1
                return told
        return None

    async def _task_of(self, process: int) -> Told | None:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", FORWARDED: "1"}
        async with await self._asked(process, "/v1/sessions", b'{"wait_s": 0.0}', headers, TASK_S) as answer:
            body = await self._body(process, answer)
            return msgspec.json.decode(body, type=Told) if answer.status == 200 else None

    async def _give_back(self, process: int, asking: "asyncio.Future[Told | None]") -> None:
        """Whoever waited for it has gone."""
        try:
            if (told := await asking) is not None:
                await self.whole(process, f"/v1/sessions/{told['session_id']}/give_back", told["session_id"], b"{}")
        except ApiError:
            self.counts["process_away"] += 1  # and its tasks with it

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    # --- HTTP

    async def _asked(
        self, process: int, path: str, data: bytes, headers: Mapping[str, str], answer_s: float = 0.0
    ) -> aiohttp.ClientResponse:
        if self._http is None:
            # as many at the same time as there are programs
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(None, sock_connect=CONNECT_S, sock_read=answer_s or self.answer_s)
        try:
            address = address_in(self.run_dir / gateway_file(process))
            return await self._http.post(address.url + path, data=data, headers=headers, timeout=limit)
        except (OSError, aiohttp.ClientError) as error:
            raise _away(process, error) from error

    async def _body(self, process: int, answer: aiohttp.ClientResponse) -> bytes:
        try:
            return await answer.read()
        except (OSError, aiohttp.ClientError) as error:
            raise _away(process, error) from error

    async def _next(self, process: int, answer: aiohttp.ClientResponse) -> bytes:
        """Of a stream; empty at its end."""
        try:
            return await answer.content.readany()
        except (OSError, aiohttp.ClientError) as error:
            raise _away(process, error) from error

    async def close(self) -> None:
        for task in list(self._returning):
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        if self._http is not None:
            await self._http.close()


def _away(process: int, error: Exception) -> ApiError:
    return ApiError(
        503,
        "process_away",
        f"the session is at rollout process {process}, which does not answer ({type(error).__name__}: {error}); if it "
        "has ended the session is gone with it, and its sample is a task again: POST /v1/sessions",
    )
