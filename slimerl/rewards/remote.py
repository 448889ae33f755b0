"""Requests to a judging service: by a deadline, a bounded number at a time, repeated only where that can help.

Flows in: JSON values, many at once. Flows out: the body of a good answer, or `RemoteFailure` with its name.
Invariants: from its slot on a request takes `timeout_s` at most, all tries and waits together; what the service has
refused, or answered with nonsense, is not sent again; while the circuit breaker is open requests wait for it, since the
samples behind them were dear, and fail as `circuit_open` only at their deadline.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from slimerl.rewards.breaker import Breaker
from slimerl.rewards.outcome import Events, RewardUnavailable

TRIES = 3
RETRY_DELAYS_S = (0.2, 1.0)
"""Before the second and third try."""
MAX_BODY_BYTES = 4 * 2**20
"""Of an answer; a verdict has some hundred bytes, a judge's reasoning some thousand."""
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be another at the next try."""


class RemoteFailure(Exception):
    """No answer that could be used. `reason`: one word, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _TryAgain(RemoteFailure):
    """As its base, but another try may succeed."""


@dataclass
class Remote:
    """`await start()`, `post` as often as wished, `await close()`; all in one event loop."""

    url: str
    timeout_s: float
    concurrency: int
    token_variable: str | None = None
    breaker: Breaker = field(default_factory=Breaker)
    events: Events = field(default_factory=Events)
    """`request_retried`, `circuit_opened`."""
    _session: aiohttp.ClientSession | None = None
    _slots: asyncio.Semaphore = field(init=False)
    _learnt: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request's end may have changed the breaker."""

    async def start(self) -> None:
        """Raises RewardUnavailable: no token where one is named."""
        headers = {}
        if self.token_variable is not None:
            token = os.environ.get(self.token_variable)
            if not token:
                raise RewardUnavailable(missing_token(self.token_variable))
            headers["Authorization"] = f"Bearer {token}"
        self._slots = asyncio.Semaphore(self.concurrency)
        # The semaphore bounds the connections, and the deadline is kept here.
        self._session = aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, body: dict[str, Any]) -> bytes:
        """Raises RemoteFailure."""
        payload = msgspec.json.encode(body)
        async with self._slots:
            until = time.monotonic() + self.timeout_s
            for number in range(TRIES):
                try:
                    return await self._try(payload, until)
                except _TryAgain as failure:
                    pause = RETRY_DELAYS_S[number] if number < TRIES - 1 else None
                    if pause is None or time.monotonic() + pause > until:
                        raise
                    self.events["request_retried"] += 1
                    self.events[f"request_retried_{failure.reason}"] += 1
                    await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(self, payload: bytes, until: float) -> bytes:
        await self._admitted(until)
        probe = self.breaker.is_open
        told = False
        try:
            async with asyncio.timeout(until - time.monotonic()):
                answer = await self._send(payload)
            self.breaker.succeeded()
            told = True
            return answer
        except TimeoutError:
            self._failed(probe)
            told = True
            raise RemoteFailure("timeout", f"{self.url}: no answer within {self.timeout_s:g} s") from None
        except _TryAgain:
            self._failed(probe)
            told = True
            raise
        except RemoteFailure:
            # It answers: whatever is wrong lies in this request.
            self.breaker.succeeded()
            told = True
            raise
        finally:
            if not told:
                self.breaker.abandoned(probe)
            self._learnt.set()

    def _failed(self, probe: bool) -> None:
        before = self.breaker.opened
        self.breaker.failed(time.monotonic(), probe)
        self.events["circuit_opened"] += self.breaker.opened - before

    async def _admitted(self, until: float) -> None:
        """Wait for the breaker's leave. Raises RemoteFailure at the deadline."""
        while not self.breaker.admit(now := time.monotonic()):
            if now >= until:
                raise RemoteFailure("circuit_open", f"{self.url} has failed too often and did not recover in time")
            self._learnt.clear()
            wait_s = self.breaker.wait_s(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until - now if wait_s is None else min(until - now, wait_s)):
                    await self._learnt.wait()

    async def _send(self, payload: bytes) -> bytes:
        assert self._session is not None, "start() comes first"
        try:
            async with self._session.post(
                self.url, data=payload, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                return _checked(response.status, await _limited(response), self.url)
        except aiohttp.ClientConnectorError as error:
            raise _TryAgain("unreachable", f"{self.url}: {error}") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError) as error:
            raise _TryAgain("disconnected", f"{self.url}: {error!r}") from error
        except aiohttp.ClientError as error:
            raise RemoteFailure("garbled", f"{self.url}: {error!r}") from error


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RemoteFailure("garbled", f"the answer has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _checked(status: int, body: bytes, url: str) -> bytes:
    if status == 200:
        return body
    detail = f"{url} answered {status}: {body[:300].decode(errors='replace')}"
    if status in _AGAIN:
        raise _TryAgain("busy" if status == 429 else "server_error", detail)
    raise RemoteFailure("server_error" if status >= 500 else "refused", detail)


def missing_token(variable: str) -> str:
    return f"token_variable: the environment has no {variable}, which is to hold the service's bearer token; export it"


@dataclass(frozen=True)
class RemoteScorer:
    """What each reward behind a service does beside scoring."""

    remote: Remote

    async def start(self) -> None:
        await self.remote.start()

    async def close(self) -> None:
        await self.remote.close()

    def take_events(self) -> Counter[str]:
        return self.remote.events.take()
