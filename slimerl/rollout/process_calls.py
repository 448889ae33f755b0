"""Calls from one rollout process of a run to another, wherever that is now.

Flows in: a message, the number of the process. Flows out: its answer.
Invariant: every call ends in time, with an answer or an error that says whether another attempt may help: the process
may be starting, ending, or another one in its place.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import TOKEN_HEADER, Refusal, decode, encode, read_address
from slimerl.samples.messages import Path as Endpoint

Answer = TypeVar("Answer")

RETRY_S = 0.5
LEAST_S = 0.1
"""For one call: to aiohttp no time is all the time there is."""


class ProcessUnreachable(RuntimeError):
    """It did not take what was sent, or not in time; worth another attempt."""


class ProcessRefused(RuntimeError):
    """It did not accept what was said; it would not the next time."""


class ProcessCalls:
    """`close` it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        process: int,
        path: Endpoint,
        message: msgspec.Struct | None,
        read: Callable[[bytes], Answer],
        within_s: float,
    ) -> Answer:
        """
        Args:
            message: None: it is only asked what there is.
            read: of the body of the answer; raises msgspec.MsgspecError where it is none.

        Raises:
            ProcessUnreachable, ProcessRefused: see there.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession()
        limit = aiohttp.ClientTimeout(total=within_s)
        try:
            address = read_address(self._run_dir, process)
            url, headers = address.url + path, {TOKEN_HEADER: address.token}
            method, body = ("GET", None) if message is None else ("POST", encode(message))
            asking = self._session.request(method, url, data=body, headers=headers, timeout=limit)
            async with asking as response:
                answer, status = await response.read(), response.status
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            raise ProcessUnreachable(f"{path}: {type(error).__name__}: {error}") from error
        try:
            if status < 400:
                return read(answer)
            why = decode(answer, Refusal).error
        except msgspec.MsgspecError as error:
            raise ProcessUnreachable(f"{path}: the answer ({status}) cannot be read: {error}") from error
        # 401: the address file is of a process that has ended; 5xx: it is ending, or its disk is slow
        if status == 401 or status >= 500:
            raise ProcessUnreachable(f"{path}: refused with {status}: {why}")
        raise ProcessRefused(f"{path}: refused with {status}: {why}")

    async def ask_again(
        self,
        process: int,
        path: Endpoint,
        message: msgspec.Struct | None,
        read: Callable[[bytes], Answer],
        deadline: Deadline,
    ) -> Answer:
        """As `ask`, until it or another in its place has answered. Raises ProcessRefused, DeadlineExceeded."""
        seen = ""
        while True:
            deadline.check(seen)
            try:
                return await self.ask(process, path, message, read, max(deadline.remaining_s, LEAST_S))
            except ProcessUnreachable as error:
                seen = str(error)
                await asyncio.sleep(min(RETRY_S, deadline.remaining_s))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
