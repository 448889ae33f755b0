"""Several rollout processes under one ledger, in this process: each a scene of its own, with real HTTP between them."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from aiohttp import web
from scene import Scene, rollout

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.announcing import announce
from slimerl.rollout.front import FrontService, ShardService
from slimerl.rollout.ledger_desk import LedgerDesk, open_ledger
from slimerl.rollout.ledger_line import LedgerLine, remote_ledger
from slimerl.rollout.process_calls import ProcessCalls
from slimerl.samples.messages import BatchManifest, ServiceAddress, address_file
from slimerl.training.several_rollouts import SeveralRollouts

GROUPS, SIZE, STEPS = 4, 3, 3
LEASE_S, PATIENCE_S = 2.0, 20.0
Made = dict[str, tuple[bytes, bytes]]
"""Tokens and versions of each sample."""


@dataclass
class Fleet:
    """Rollout processes, each in a scene of its own; the first has the ledger."""

    run_dir: Path
    desk: LedgerDesk
    scenes: list[Scene]
    lines: list["asyncio.Task[None]"]
    runners: list[web.AppRunner]

    @property
    def front(self) -> FrontService:
        service = self.scenes[0].service
        assert isinstance(service, FrontService)
        return service

    async def serve(self, version: int) -> None:
        """Engines of all hold `version`, as after a sync; the first process tells the ledger."""
        for scene in self.scenes:
            await scene.serve(version)
        await self.desk.advance(version)

    async def update(self, version: int) -> None:
        """As `serve`, while requests stay in the engines."""
        for scene in self.scenes:
            scene.scheduler.dispatcher.hold()
            for engine in scene.engines:
                engine.version = str(version)
            scene.router.release(version, [engine.engine_id for engine in scene.engines], {})
            scene.scheduler.advance(version)
            scene.scheduler.dispatcher.resume()
        await self.desk.advance(version)

    async def trainer(self) -> SeveralRollouts:
        deadline = Deadline("the rollout processes", PATIENCE_S)
        connected = SeveralRollouts.connect_all, self.run_dir, deadline, PATIENCE_S, len(self.scenes)
        return await asyncio.to_thread(*connected)

    async def take(self, step: int) -> tuple[BatchManifest, Made]:
        manifest = await next_batch(self.desk, step)
        client = await self.trainer()
        ids = [each.sample_id for each in manifest.samples]
        shards = [manifest.shards[each.group_id] for each in manifest.samples]
        payloads = await asyncio.to_thread(client.fetch, ids, shards)
        assert [each.sample_id for each in payloads] == ids
        return manifest, {each.sample_id: (each.tokens, each.versions) for each in payloads}

    async def end(self, shard: int) -> None:
        """As a process does that is killed: nobody answers for it, and it says nothing more."""
        self.lines[shard].cancel()
        await self.runners[shard].cleanup()
        await self.scenes[shard].scheduler.close()


async def next_batch(desk: LedgerDesk, step: int) -> BatchManifest:
    async with asyncio.timeout(PATIENCE_S):
        while (manifest := desk.take_batch(step)) is None:
            await asyncio.sleep(0.005)
        await desk.tell()
        return manifest


async def told_by(scene: Scene, ask: Any) -> None:
    scheduler: Any = scene.scheduler
    journal = {} if scheduler.journal is None else {"journaled": scheduler.journal.written}
    line = LedgerLine(scheduler.link, ask, scheduler.offer, scheduler.carry_out, PATIENCE_S, **journal)
    scheduler.news = scene.service.news = line.wake  # type: ignore[attr-defined]
    await line.run()


def service_of(scene: Scene, kind: type[ShardService], **more: Any) -> ShardService:
    """As of one of several processes, with the parts that the scene has."""
    parts = {each.name: getattr(scene.service, each.name) for each in fields(scene.service) if each.name[0] != "_"}
    return kind(**parts, **more)


async def listen(run_dir: Path, shard: int, service: ShardService) -> web.AppRunner:
    """To be cleaned up."""
    runner = web.AppRunner(service.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    announce(run_dir / address_file(shard), ServiceAddress(url, service.token, os.getpid()))
    return runner


def fleet(
    act: Callable[[Fleet], Coroutine[Any, Any, Any]],
    run_dir: Path,
    shards: int,
    staleness: int = 0,
    **given: Any,
) -> Any:
    """What `act` returns. `given`: to `rollout`, where it is to be another than usual."""
    options = {"engines": 1, "groups": GROUPS, "size": SIZE, "staleness": staleness, "steps": STEPS, **given}

    async def run() -> Any:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            gate = StalenessGate(options["groups"], staleness, options["steps"])
            desk = await open_ledger(run_dir / "ledger", gate, options["size"], shards, LEASE_S, PATIENCE_S)
            stack.callback(desk.close)
            calls = ProcessCalls(run_dir)
            stack.push_async_callback(calls.close)
            scenes, runners = [], []
            for shard in range(shards):
                scene = await stack.enter_async_context(rollout(**options, shard=shard))
                front = {"desk": desk, "calls": calls, "samples_per_group": options["size"], "restore_s": PATIENCE_S}
                scene.service = service_of(scene, ShardService) if shard else service_of(scene, FrontService, **front)
                scenes.append(scene)
                runners.append(await listen(run_dir, shard, scene.service))
                stack.push_async_callback(runners[-1].cleanup)
            asks = [desk.hear, *(remote_ledger(calls) for _ in scenes[1:])]
            lines = [asyncio.ensure_future(told_by(scene, ask)) for scene, ask in zip(scenes, asks, strict=True)]
            watch = asyncio.ensure_future(desk.watch())
            try:
                return await act(Fleet(run_dir, desk, scenes, lines, runners))
            finally:
                for task in (*lines, watch):
                    task.cancel()
                ended = await asyncio.gather(*lines, watch, return_exceptions=True)
                assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    return asyncio.run(run())
