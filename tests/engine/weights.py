"""A whole weight update of running engines, as the trainer makes it, step by step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from engine_fixtures import RunningEngine

from slimerl.engine.fleet import EngineFleet
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.resharding.transports.ipc import IpcCarrier
from slimerl.samples.messages import EngineInfo

BUCKET_BYTES = 1 << 19
"""A quarter of a tiny model: updates take several buckets."""
TIMEOUT_S = 30.0


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

    def buckets(self, model: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        state = model.state_dict()
        for bucket in split_into_buckets(self.tensors, self._fused, BUCKET_BYTES):
            yield [(tensor.name, state[tensor.name].detach()) for tensor in bucket]


@contextmanager
def open_update(infos: Sequence[EngineInfo], timeout_s: float = TIMEOUT_S) -> Iterator[tuple[EngineFleet, IpcCarrier]]:
    """Engines paused and in an update session; afterwards closed and generating again, whatever happened."""
    with EngineFleet(infos, timeout_s) as fleet, IpcCarrier(fleet, BUCKET_BYTES, timeout_s) as carrier:
        fleet.pause()
        fleet.begin_weight_update()
        try:
            yield fleet, carrier
        finally:
            for engine_id in list(fleet.failures):
                del fleet.failures[engine_id]  # tests go on with engines that a fault was injected into
            fleet.end_weight_update(None)
            fleet.flush_cache()
            fleet.continue_generation()


def update(engine: RunningEngine, model: Any, version: int, others: Sequence[EngineInfo] = ()) -> dict[str, str]:
    """Move `model` into the engines; returns why each of those that failed did."""
    plan = Plan(engine)
    proof = WeightProof(plan.tensors, plan.placements)
    with (
        EngineFleet([engine.info, *others], TIMEOUT_S) as fleet,
        IpcCarrier(fleet, BUCKET_BYTES, TIMEOUT_S) as carrier,
    ):
        fleet.pause()
        fleet.begin_weight_update()
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
