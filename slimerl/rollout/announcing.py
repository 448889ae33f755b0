"""The rollout role listens, and says where in the run directory.

Flows in: services that are ready. Flows out: their address files, for as long as they are served.
Invariant: an address file is whole or not there, and this user's alone: it has the key to the service.
"""

import json
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from slimerl.engine.local_resources import own_address
from slimerl.rollout.gateway.front import Gateway, listening
from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.rollout.service import ControlService
from slimerl.samples.messages import ServiceAddress, address_file, gateway_file
from slimerl.spec import RunSpec
from slimerl.spec.agent import ExternalAgent

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""For requests in progress when the role ends; they have been refused by then."""
KEY_FILE = "gateway.key"
"""Beside the journals."""


@asynccontextmanager
async def service_listening(spec: RunSpec, service: ControlService, token: str, process: int) -> AsyncIterator[None]:
    """Bound as `cluster.network` says. Args: `process`: number of this rollout process."""
    runner = web.AppRunner(service.application(), access_log=None, shutdown_timeout=GRACE_S)
    await runner.setup()
    address_path = spec.run_dir / address_file(process)
    try:
        host = own_address(spec.cluster.network)
        await web.TCPSite(runner, host, spec.rollout.port).start()
        port = runner.addresses[0][1]
        announce(address_path, ServiceAddress(f"http://{host}:{port}", token, os.getpid()))
        logger.info("serving on port %d", port)
        yield
    finally:
        address_path.unlink(missing_ok=True)
        await runner.cleanup()


@asynccontextmanager
async def gateway_listening(spec: RunSpec, gateway: Gateway, process: int) -> AsyncIterator[None]:
    """As `service_listening`, for agent programs."""
    address_path = spec.run_dir / gateway_file(process)
    port = spec.agent.port if isinstance(spec.agent, ExternalAgent) and not process else 0
    async with listening(gateway, own_address(spec.cluster.network), port, GRACE_S) as url:
        announce(address_path, ServiceAddress(url, gateway.key, os.getpid()))
        logger.info("agent programs are served at %s", url)
        try:
            yield
        finally:
            address_path.unlink(missing_ok=True)
            if gateway.elsewhere is not None:
                await gateway.elsewhere.close()


def announce(path: Path, address: ServiceAddress) -> None:
    """Write the address for this user alone, all at once: a reader sees the whole file or none."""
    _private(path, json.dumps(msgspec.to_builtins(address))).replace(path)


def gateway_key(spec: RunSpec) -> str:
    """For agent programs. Several rollout processes have the same, which lasts as long as one start of the run,
    whichever of them end: the first that comes chooses it. Raises OSError."""
    if spec.rollout.processes == 1:
        return secrets.token_hex(16)
    path = spec.run_dir / JOURNAL_DIR / KEY_FILE
    part = _private(path, secrets.token_hex(16))
    try:
        os.link(part, path)  # unlike a rename it leaves what is there
    except FileExistsError:
        logger.info("the key for agent programs is that of the other rollout processes")
    part.unlink()
    return path.read_text(encoding="utf-8")


def _private(path: Path, text: str) -> Path:
    """Beside `path`, whole, and this user's alone. Its name is nobody else's: processes of two machines may have the
    same number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return part
