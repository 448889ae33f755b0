"""The rollout role listens, and says where in the run directory.

Flows in: services that are ready. Flows out: their address files, for as long as they are served.
Invariant: an address file is whole or not there, and this user's alone: it has the key to the service.
"""

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from slimerl.engine.local_resources import own_address
from slimerl.rollout.gateway.build import GATEWAY_FILE
from slimerl.rollout.gateway.front import Gateway, listening
from slimerl.rollout.service import ControlService
from slimerl.samples.messages import ServiceAddress, address_file
from slimerl.spec import RunSpec
from slimerl.spec.agent import ExternalAgent

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""For requests in progress when the role ends; they have been refused by then."""


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
async def gateway_listening(spec: RunSpec, gateway: Gateway) -> AsyncIterator[None]:
    """As `service_listening`, for agent programs."""
    address_path = spec.run_dir / GATEWAY_FILE
    port = spec.agent.port if isinstance(spec.agent, ExternalAgent) else 0
    async with listening(gateway, own_address(spec.cluster.network), port, GRACE_S) as url:
        announce(address_path, ServiceAddress(url, gateway.key, os.getpid()))
        logger.info("agent programs are served at %s", url)
        try:
            yield
        finally:
            address_path.unlink(missing_ok=True)


def announce(path: Path, address: ServiceAddress) -> None:
    """Write the address for this user alone, all at once: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(msgspec.to_builtins(address), file)
    part.replace(path)
