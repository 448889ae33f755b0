"""A whole weight update of running engines, as the trainer makes it, step by step; over each transport."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_fixtures import RunningEngine

from slimerl.engine.fleet import EngineFleet
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.families import family_of
from slimerl.resharding.hf_checkpoint import HfCheckpoint
from slimerl.resharding.layouts import EngineLayout
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.resharding.transports.broadcast import BroadcastCarrier
from slimerl.resharding.transports.carrier import Carrier
from slimerl.resharding.transports.delta import DeltaCarrier
from slimerl.resharding.transports.disk import DiskCarrier
from slimerl.resharding.transports.ipc import IpcCarrier
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineInfo

BUCKET_BYTES = 1 << 19
"""A quarter of a tiny model: updates take several buckets."""
TIMEOUT_S = 30.0
TRANSPORTS = ("ipc", "broadcast", "disk")
"""Those of whole buckets, which go through the model's `load_weights`."""


class Plan:
    """What goes where for one model and engine size."""

    def __init__(self, engine: RunningEngine) -> None:
        config: Mapping[str, Any] = json.loads((engine.model_path / "config.json").read_text())
        family = family_of(config)
        size = engine.info.tensor_parallel
        self.tensors: list[LogicalTensor] = family.logical_tensors(config)
        self.placements: list[list[Placement]] = [
            family.engine_placements(config, EngineLayout(tensor=size), rank) for rank in range(size)
        ]
        self._fused = family.fused_groups(config)

    def buckets(self, model: Any, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """`model`: a transformers model or the directory of a checkpoint."""
        with ExitStack() as opened:
            state = opened.enter_context(HfCheckpoint(model)) if isinstance(model, Path) else model.state_dict()
            for bucket in split_into_buckets(self.tensors, self._fused, bucket_bytes):
                yield [(tensor.name, state[tensor.name].detach()) for tensor in bucket]


@contextmanager
def open_carrier(transport: str, fleet: EngineFleet, timeout_s: float, directory: Path | None = None) -> Iterator[Any]:
    """`directory`: for `disk`; default: a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        carrier: Carrier
        if transport == "ipc":
            carrier = IpcCarrier(fleet, BUCKET_BYTES, timeout_s)
        elif transport == "broadcast":
            carrier = BroadcastCarrier(fleet, timeout_s)
        else:
            carrier = DiskCarrier(fleet, directory or Path(temporary) / "sync", timeout_s)
        with carrier:
            yield carrier


def open_delta(fleet: EngineFleet, plan: Plan, state: SentState | None, timeout_s: float) -> DeltaCarrier:
    """`state`: that of the last delta; None: the first."""
    transfer = Deadline("the transfer", timeout_s)
    return DeltaCarrier(fleet, SentState() if state is None else state, plan.placements, timeout_s, transfer)


@contextmanager
def open_update(
    infos: Sequence[EngineInfo], timeout_s: float = TIMEOUT_S, transport: str = "ipc", directory: Path | None = None
) -> Iterator[tuple[EngineFleet, Any]]:
    """Engines paused and in an update session; afterwards closed and generating again, whatever happened."""
    try:
        with EngineFleet(infos, timeout_s) as fleet:
            fleet.pause()
            fleet.begin_weight_update()
            with open_carrier(transport, fleet, timeout_s, directory) as carrier:
                yield fleet, carrier
    finally:
        # A fleet of its own: tests go on with engines that a fault was injected into, and that may still be late.
        with EngineFleet(infos, TIMEOUT_S) as fleet:
            fleet.begin_weight_update()  # also where the test has ended its session
            fleet.end_weight_update(None)
            fleet.flush_cache()
            fleet.continue_generation()


def update(
    engine: RunningEngine,
    model: Any,
    version: int,
    others: Sequence[EngineInfo] = (),
    transport: str = "ipc",
    timeout_s: float = TIMEOUT_S,
    state: SentState | None = None,
) -> dict[str, str]:
    """Move `model` (see `Plan.buckets`) into the engines; returns why each of those that failed did. `state`: for
    `delta`, what was sent last."""
    plan = Plan(engine)
    proof = WeightProof(plan.tensors, plan.placements)
    with EngineFleet([engine.info, *others], timeout_s) as fleet:
        fleet.pause()
        fleet.begin_weight_update()
        with (
            open_delta(fleet, plan, state, timeout_s)
            if transport == "delta"
            else open_carrier(transport, fleet, timeout_s)
        ) as carrier:
            carrier.check(plan.tensors, plan.placements)
            for bucket in plan.buckets(model):
                carrier.send(bucket)
                for name, tensor in bucket:
                    proof.add(name, tensor)
            carrier.prove(version, plan.placements, proof)
        fleet.end_weight_update(version)
        fleet.flush_cache()
        fleet.continue_generation()
        return fleet.failures
