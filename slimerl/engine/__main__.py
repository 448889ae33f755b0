"""The engine role: `python -m slimerl.engine SPEC --index I [--node N --head ADDRESS] [key=value …]`.

Starts one SGLang server, waits until it can generate, registers it with the rollout role, and watches it. With a
rollout role that is started in the place of one that ended it registers again, with the version that it serves. An
engine whose GPUs are on several machines has a role on each; that of the first one registers it.
Ends with 0 when asked to (SIGTERM, SIGINT), with 1 and the tail of the server's log when the server ends by itself.
Writes one line per change of state.
"""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from slimerl.engine.client import EngineError
from slimerl.engine.launcher import Device, Server, ServerFailed, detect_device, start_server
from slimerl.engine.local_resources import NoAddress
from slimerl.engine.protocol import UNVERIFIED_VERSION, MemoryTag
from slimerl.engine.registration import RegistrationFailed, follow, register
from slimerl.resilience import heartbeat
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.failure_kinds import UNUSABLE_INPUT
from slimerl.samples.messages import EngineInfo, ServiceAddress, process_of_engine
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.telemetry import trace
from slimerl.telemetry.resources import ResourceMeter

_WATCH_S = 0.2
_ASK_S = 5.0
"""For the server to end what runs, and to say which version it serves."""


async def run_role(spec: RunSpec, index: int, node: int = 0, head: str = "") -> None:
    """Serve until cancelled.

    Raises:
        ServerFailed: the server ended.
        DeadlineExceeded, EngineError, RegistrationFailed: it did not become ready, or a rollout role that was started
            again does not take it.
    """
    device = detect_device()
    started, serving = time.monotonic(), None
    following: asyncio.Task[None] | None = None
    server = start_server(spec, index, device, node, head)
    # each machine of an engine has a record of its own
    name = f"{server.engine_id}@{node}" if node else server.engine_id
    trace.start(spec.run_dir, name)
    alive = heartbeat.start_of_loop(spec.run_dir, name, spec.deadlines.stall_s)
    resources = asyncio.create_task(ResourceMeter(spec.run_dir, name).watch())
    say(server, f"starting SGLang on {device}, tensor parallel {spec.engine.tensor_parallel}; log: {server.log_path}")
    try:
        if node == 0:
            deadline = Deadline(f"{server.engine_id} to become healthy", spec.deadlines.start_s)
            await server.wait_until_healthy(deadline)
            healthy = time.monotonic()
            trace.add("start", started, healthy, "server")
            say(server, f"healthy after {healthy - started:.1f} s at {server.url}")
            if spec.takes_turns(device is Device.CUDA):
                await leave_gpus(server, spec.deadlines.start_s)
            process = process_of_engine(index, spec.rollout.processes)
            known = await _register_while_running(spec, server, process)
            serving = time.monotonic()
            trace.add("register", healthy, serving, "server")
            say(server, "registered with the rollout role")
            following = asyncio.create_task(_follow(spec, server, known, process))
        while True:
            server.check_running()
            if following is not None and following.done():
                following.result()
            await asyncio.sleep(_WATCH_S)
    finally:
        for task in filter(None, (resources, alive, following)):
            task.cancel()
        if serving is not None:
            trace.add("serve", serving, time.monotonic(), "server")
        trace.stop()
        say(server, "stopping the server")
        server.stop()


async def leave_gpus(server: Server, timeout_s: float) -> None:
    """Give up all memory that can be given up: the trainer builds its model on the same GPUs once every engine has
    registered, and hands memory back with the first weights. Raises EngineError."""
    async with server.client(timeout_s) as client:
        await client.release_memory([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS])
    say(server, "gave its memory up to the trainer")


async def _register_while_running(spec: RunSpec, server: Server, process: int) -> ServiceAddress:
    """Returns with whom."""
    deadline = Deadline(f"the rollout role to take {server.engine_id}", spec.deadlines.start_s)
    registration = asyncio.create_task(register(_info(spec, server), spec.run_dir, deadline, process))
    try:
        while not registration.done():
            server.check_running()
            await asyncio.wait({registration}, timeout=_WATCH_S)
        return registration.result()
    finally:
        registration.cancel()


async def _follow(spec: RunSpec, server: Server, known: ServiceAddress, process: int) -> None:
    async def describe() -> EngineInfo:
        version = await version_for_nobody(server)
        say(server, f"registers with the rollout role that was started again, at version {version}")
        return _info(spec, server, version)

    await follow(describe, spec.run_dir, known, spec.deadlines.start_s, process)


async def version_for_nobody(server: Server) -> int:
    """That it serves, once what it generates for a rollout role that is gone has been ended; -1 where it does not say
    so: it serves again after a weight sync then."""
    async with server.client(_ASK_S) as client:
        try:
            await client.abort()
            return await client.weight_version()
        except EngineError as error:
            say(server, f"its version is not known: {error}")
            return UNVERIFIED_VERSION


def _info(spec: RunSpec, server: Server, version: int = UNVERIFIED_VERSION) -> EngineInfo:
    return EngineInfo(server.engine_id, server.url, server.admin_key, spec.engine.tensor_parallel, version=version)


def say(server: Server, what: str) -> None:
    print(f"{server.engine_id}: {what}", flush=True)


async def _until_signal(spec: RunSpec, index: int, node: int, head: str) -> None:
    role = asyncio.create_task(run_role(spec, index, node, head))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, role.cancel)
    try:
        await role
    except asyncio.CancelledError:
        return  # asked to stop, and stopped


def _no_such_place(spec: RunSpec, index: int, node: int) -> str | None:
    """Why the spec has no such engine, and which it has."""
    if not spec.uses_engines:
        return f"algorithm {spec.algorithm.name} reads its responses from the data; it has no engines to start"
    if not 0 <= index < spec.engine.replicas:
        return f"--index {index}: engine.replicas has engines 0 to {spec.engine.replicas - 1}; choose one of them"
    if not 0 <= node < spec.nodes_per_engine:
        return f"--node {node}: an engine has machines 0 to {spec.nodes_per_engine - 1}; choose one of them"
    return None


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m slimerl.engine", description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--node", type=int, default=0, help="which of the engine's machines this is")
    parser.add_argument("--head", default="", help="address of the first of them")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        spec = load_spec(arguments.spec, arguments.overrides)
        if spec.nodes_per_engine > 1 and not arguments.head:
            parser.error(f"an engine of {spec.nodes_per_engine} machines needs --head, the address of its first one")
        if (fault := _no_such_place(spec, arguments.index, arguments.node)) is not None:
            print(f"{arguments.spec}: {fault}", file=sys.stderr, flush=True)
            return UNUSABLE_INPUT
        asyncio.run(_until_signal(spec, arguments.index, arguments.node, arguments.head))
    except SpecError as error:
        print(error, file=sys.stderr, flush=True)
        return UNUSABLE_INPUT
    except (ServerFailed, DeadlineExceeded, EngineError, NoAddress, RegistrationFailed) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
