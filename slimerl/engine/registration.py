"""How an engine role makes its server known to the rollout role.

Flows in: `EngineInfo`. Flows out: one POST that the control service has accepted. The service may start later than
the engine, so that its address file and its port are waited for; a refusal is final.
"""

import asyncio
from pathlib import Path

import aiohttp
import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.samples import messages
from slimerl.samples.messages import TOKEN_HEADER, EngineInfo, Refusal, address_file

_RETRY_S = 0.2
_ATTEMPT_TIMEOUT_S = 10.0


class RegistrationFailed(RuntimeError):
    """The rollout role refused the engine."""


async def register(info: EngineInfo, run_dir: Path, deadline: Deadline, process: int = 0) -> None:
    """Register until accepted.

    Args:
        process: number of the rollout process that is to have the engine.

    Raises:
        RegistrationFailed: the control service refused.
        DeadlineExceeded: it did not appear, or did not answer; the message says which.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ATTEMPT_TIMEOUT_S)) as session:
        while True:
            problem = await _attempt(session, info, run_dir, process)
            if problem is None:
                return
            deadline.check(problem)
            await asyncio.sleep(_RETRY_S)


async def _attempt(session: aiohttp.ClientSession, info: EngineInfo, run_dir: Path, process: int) -> str | None:
    """None on success, else why another attempt may help."""
    try:
        address = messages.read_address(run_dir, process)
    except FileNotFoundError:
        return f"{run_dir / address_file(process)} is not there: has the rollout role started?"
    url = address.url.rstrip("/") + messages.Path.REGISTER_ENGINE
    try:
        async with session.post(url, data=messages.encode(info), headers={TOKEN_HEADER: address.token}) as response:
            body = await response.read()
            if response.status < 400:
                return None
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{url} does not answer: {type(error).__name__}: {error}"
    raise RegistrationFailed(f"{url} refused {info.engine_id} ({response.status}): {_refusal(body)}")


def _refusal(body: bytes) -> str:
    try:
        return messages.decode(body, Refusal).error
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
