"""A whole `shards` sync with an engine's door, but no engine behind it: what a slow engine may take of the lease."""

import asyncio
import base64
import pickle
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
from aiohttp import web
from test_shard_members import CONFIG, Holder, filled

from slimerl.engine.inside import loader, receiver
from slimerl.engine.protocol import Endpoint
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology
from slimerl.resharding.shard_sync import ShardSyncer
from slimerl.resharding.shard_trainer import ShardModel
from slimerl.resharding.sync_plan import plan_sync
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.samples.messages import EngineInfo, HoldReply, HoldRequest, ReleaseRequest, Status

SYNC_S = 18.0
"""Of the lease; a call may take a sixth of it, the transfer must be over at its half."""
SLOW_S = 1.6
"""Of five calls: with the session that was left open, `begin` takes three."""


class Door:
    """Answers every call of an update; the messages to the loader go to the loader."""

    def __init__(self, model: Any) -> None:
        self._model, self._loop = model, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.slow: set[str] = set()
        """Endpoints that take `SLOW_S`."""
        self.left_open = False
        """An earlier coordinator left its session open."""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/{call}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path in self.slow:
            await asyncio.sleep(SLOW_S)
        if request.path == Endpoint.BEGIN_UPDATE and self.left_open:
            self.left_open = False
            return web.json_response({"error": {"message": "a session is already open"}}, status=400)
        if request.path == Endpoint.UPDATE_FROM_TENSOR:
            [data] = (await request.json())["serialized_named_tensors"]
            message = pickle.loads(base64.b64decode(data))
            await asyncio.to_thread(loader.receive, self._model, message)
        return web.json_response({})


class Desk:
    def __init__(self, engine: EngineInfo) -> None:
        self._engine = engine
        self.released: list[ReleaseRequest] = []

    def status(self) -> Status:
        return Status(0, 0, 0, 0, 0, {}, [self._engine])

    def hold(self, _request: HoldRequest) -> HoldReply:
        return HoldReply("lease", [self._engine])

    def release(self, request: ReleaseRequest) -> None:
        self.released.append(request)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A plan for one trainer rank and one engine rank, the trainer's parameters, and the engine's."""
    monkeypatch.setattr(loader, "tensor_rank", lambda: 0)
    plan = plan_sync(CONFIG, family_of(CONFIG), MegatronLayout(), [0], EngineLayout(), torch.float32, 1024)
    state = {tensor.name: torch.randn(tensor.shape) for tensor in plan.tensors}
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    yield plan, filled(plan.trainer_ranks[0], state), Holder(filled(plan.engine_ranks[0], empty))
    while receiver._receivers:
        receiver._receivers.pop().close()


def test_w12_what_pause_and_open_take_is_no_time_for_the_transfer(weights: Any) -> None:
    """Fault: an engine answers, but takes half as long for every call as it may. A transfer that had its whole time
    after that, and what follows it, would not be over when the lease is."""
    plan, parameters, model = weights

    def shape_of(engines: int) -> SyncShape:
        return SyncShape(CONFIG, MegatronLayout(), EngineLayout(), Topology(1, 1, engines, 1), torch.float32)

    with Door(model) as door:
        desk: Any = Desk(EngineInfo("engine-0", door.url, "key", 1))
        shards = ShardModel(plan, plan.trainer_ranks, shape_of)
        syncer = ShardSyncer(shards, 0, lambda: parameters, desk, lambda value: [value], SYNC_S, staged=False)
        try:
            syncer.sync(1)
            assert desk.released.pop() == ReleaseRequest("lease", 1, ["engine-0"], {})
            door.slow = {Endpoint.PAUSE, Endpoint.BEGIN_UPDATE, Endpoint.END_UPDATE, Endpoint.UPDATE_FROM_TENSOR}
            door.left_open = True
            with pytest.raises(DeadlineExceeded, match=r"of 9 s are left of the transfer of version 2, too few"):
                syncer.sync(2)
            assert "engine-0" in desk.released.pop().dirty
        finally:
            syncer.close()
