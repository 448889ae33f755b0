"""Engines between syncs, with the rollout role's own hold and the trainer's own syncer: who joins late gets the next
version, who failed is dirty and not served, and comes back by a whole, proven rewrite."""

import asyncio
import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_fixtures import Engines, RunningEngine
from reference import largest_difference, logprobs_of
from test_transport_faults import standing_still
from tiny_models import make_tiny_model

from slimerl.engine.protocol import SamplingParams
from slimerl.resharding.assemble import scatter
from slimerl.resharding.families import family_of
from slimerl.resharding.hf_checkpoint import HfCheckpoint
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.sync import WeightSyncer
from slimerl.resharding.sync_plan import plan_sync
from slimerl.resharding.transports.disk import BucketNotWritten
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.engines import EngineClients
from slimerl.rollout.router import LeastLoaded
from slimerl.rollout.weights import WeightHold
from slimerl.samples.messages import EngineState, HoldReply, HoldRequest, ReleaseRequest

PROMPT = [10, 20, 30, 40, 50]
LEASE_S = 30.0
BUCKET_BYTES = 1 << 19


class RolloutRole:
    """Router and hold on an event loop of their own, as in the role's process; a `WeightControl` for the syncer."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.held: Callable[[], None] = lambda: None
        """Called when a hold is granted, before the trainer hears of it."""
        self.call(self._build)

    async def _build(self) -> None:
        self.router, self.clients = LeastLoaded(64), EngineClients(LEASE_S)
        self.dispatcher = Dispatcher(self.router, self.clients, LEASE_S)
        self.weights = WeightHold(self.dispatcher, self.clients, engines_expected=1, start_s=LEASE_S)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def run() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def join(self, engine: RunningEngine) -> None:
        self.call(self.clients.add, engine.info)
        self.call(self.router.join, engine.info)

    def hold(self, request: HoldRequest) -> HoldReply:
        reply = self.call(self.weights.hold, request)
        self.held()
        return reply

    def release(self, request: ReleaseRequest) -> None:
        self.call(self.weights.release, request)

    def states(self) -> dict[str, tuple[EngineState, int]]:
        return {one.engine_id: (one.state, one.version) for one in self.call(self.router.engines)}

    def close(self) -> None:
        for part in (self.weights, self.dispatcher, self.clients):
            self.call(part.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Trainer:
    """One rank with Megatron's parameters of a checkpoint, without Megatron."""

    def __init__(self, model_path: Path, role: RolloutRole, transport: str, directory: Path) -> None:
        config = json.loads((model_path / "config.json").read_text())
        family, layout = family_of(config), MegatronLayout()
        plan = plan_sync(config, family, layout, [0], EngineLayout(), torch.float32, BUCKET_BYTES)
        self._placements = family.megatron_placements(config, layout, 0)
        ends: dict[str, list[int]] = {}
        for place in self._placements:
            known = ends.setdefault(place.parameter, list(place.at.stops))
            ends[place.parameter] = [max(pair) for pair in zip(known, place.at.stops, strict=True)]
        self._parameters = {name: torch.empty(shape) for name, shape in ends.items()}
        self._syncer = WeightSyncer(plan, None, lambda: self._parameters, role, LEASE_S, transport, directory)

    def sync(self, checkpoint: Path, version: int) -> dict[str, float]:
        with HfCheckpoint(checkpoint) as state:
            scatter(self._placements, state, self._parameters)
        return self._syncer.sync(version)


@pytest.fixture
def role() -> Iterator[RolloutRole]:
    role = RolloutRole()
    yield role
    role.close()


@pytest.fixture(scope="module")
def two(engines: Engines) -> Iterator[list[RunningEngine]]:
    with engines.brief(("qwen3", 1)) as [victim]:
        yield [engines("qwen3"), victim]


def assert_is(engine: RunningEngine, checkpoint: Path, version: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    result = engine.ask(lambda client: client.generate(PROMPT, SamplingParams(16, temperature=0.0)))
    assert largest_difference(logprobs_of(model, PROMPT, result.tokens), result.logprobs) < 1e-4
    assert set(result.versions) == {version}


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk", "delta"])
def test_w2_engines_that_join_late_or_fail_are_served_only_after_a_whole_rewrite(
    two: list[RunningEngine], role: RolloutRole, transport: str, tmp_path: Path
) -> None:
    """Fault: an engine stands still during the third sync."""
    steady, victim = two
    trainer = Trainer(steady.model_path, role, transport, tmp_path)
    checkpoints = [make_tiny_model("qwen3", tmp_path / f"m{seed}", seed=40 + seed) for seed in range(4)]
    role.join(steady)
    trainer.sync(checkpoints[0], 0)
    role.join(victim)
    assert role.states()[victim.info.engine_id][0] is EngineState.JOINING

    trainer.sync(checkpoints[1], 1)
    assert set(role.states().values()) == {(EngineState.SERVING, 1)}

    with standing_still_when_held(role, victim):
        trainer.sync(checkpoints[2], 2)
    assert role.states()[steady.info.engine_id] == (EngineState.SERVING, 2)
    assert role.states()[victim.info.engine_id][0] is EngineState.DIRTY
    assert "no answer within 5 s" in role.call(role.router.reasons)[victim.info.engine_id]

    phases = trainer.sync(checkpoints[3], 3)
    assert set(role.states().values()) == {(EngineState.SERVING, 3)}
    assert {"hold", "pause", "gather", "send", "digest", "verify", "commit", "release"} <= phases.keys()
    for engine in two:
        assert_is(engine, checkpoints[3], 3)


class standing_still_when_held:
    def __init__(self, role: RolloutRole, engine: RunningEngine) -> None:
        self._role, self._stopped = role, standing_still(engine)

    def __enter__(self) -> None:
        self._role.held = self._stopped.__enter__

    def __exit__(self, *details: object) -> None:
        self._role.held = lambda: None
        self._stopped.__exit__(None, None, None)


def test_w2_a_full_disk_leaves_every_engine_dirty_and_none_served(
    two: list[RunningEngine], role: RolloutRole, tmp_path: Path
) -> None:
    """Fault: the kernel refuses to let files grow beyond 64 KiB."""
    trainer = Trainer(two[0].model_path, role, "disk", tmp_path)
    checkpoint = make_tiny_model("qwen3", tmp_path / "model", seed=45)
    for engine in two:
        role.join(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(BucketNotWritten, match="cannot be written"):
            trainer.sync(checkpoint, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {state for state, _ in role.states().values()} == {EngineState.DIRTY}
    assert not list((tmp_path / "sync").iterdir())
    trainer.sync(checkpoint, 1)
    assert set(role.states().values()) == {(EngineState.SERVING, 1)}
    for engine in two:
        assert_is(engine, checkpoint, 1)
