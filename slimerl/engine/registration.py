"""How an engine role makes its server known to the rollout role, and to the next one where that ends.

Flows in: `EngineInfo`. Flows out: one POST that the control service has accepted. The service may start later than
the engine, so that its address file and its port are waited for; a refusal is final.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.samples import messages
from slimerl.samples.messages import TOKEN_HEADER, EngineInfo, Refusal, ServiceAddress, address_file

_RETRY_S = 0.2
_ATTEMPT_TIMEOUT_S = 10.0
LOOK_S = 1.0
"""Between two looks whether another rollout role has announced itself."""


class RegistrationFailed(RuntimeError):
    """The rollout role refused the engine."""


async def register(info: EngineInfo, run_dir: Path, deadline: Deadline, process: int = 0) -> ServiceAddress:
    """Register until accepted; returns by whom.

    Args:
        process: number of the rollout process that is to have the engine.

    Raises:
        RegistrationFailed: the control service refused.
        DeadlineExceeded: it did not appear, or did not answer; the message says which.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ATTEMPT_TIMEOUT_S)) as session:
        while True:
            answer = await _attempt(session, info, run_dir, process)
            if isinstance(answer, ServiceAddress):
                return answer
            deadline.check(answer)
            await asyncio.sleep(_RETRY_S)


async def follow(
    describe: Callable[[], Awaitable[EngineInfo]],
    run_dir: Path,
    known: ServiceAddress,
    within_s: float,
    process: int = 0,
) -> None:
    """Register with every rollout role that is started in the place of the one before; ends with its task.

    Args:
        describe: the engine as it is when that has happened.
        known: the role that has it.
        within_s: for another one to take it.
        process: as of `register`.

    Raises:
        RegistrationFailed, DeadlineExceeded: as `register`.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        if _has_successor(run_dir, known, process):
            info = await describe()
            deadline = Deadline(f"the rollout role that was started again to take {info.engine_id}", within_s)
            known = await register(info, run_dir, deadline, process)


def _has_successor(run_dir: Path, known: ServiceAddress, process: int) -> bool:
    try:
        return messages.read_address(run_dir, process).token != known.token
    except OSError:
        return False  # it has ended, and none has taken its place yet


async def _attempt(
    session: aiohttp.ClientSession, info: EngineInfo, run_dir: Path, process: int
) -> ServiceAddress | str:
    """Who has taken it, or why another attempt may help."""
    try:
        address = messages.read_address(run_dir, process)
    except FileNotFoundError:
        return f"{run_dir / address_file(process)} is not there: has the rollout role started?"
    url = address.url.rstrip("/") + messages.Path.REGISTER_ENGINE
    try:
        async with session.post(url, data=messages.encode(info), headers={TOKEN_HEADER: address.token}) as response:
            body = await response.read()
            if response.status < 400:
                return address
            if response.status == 401:
                return f"{url} is another rollout role's than {run_dir / address_file(process)} told of"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{url} does not answer: {type(error).__name__}: {error}"
    raise RegistrationFailed(f"{url} refused {info.engine_id} ({response.status}): {_refusal(body)}")


def _refusal(body: bytes) -> str:
    try:
        return messages.decode(body, Refusal).error
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
