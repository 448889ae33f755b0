"""Syncs from Megatron ranks to real engines; what runs on ranks is defined here, to be picklable."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch

from slimerl.samples.messages import EngineInfo, EngineState, HoldReply, HoldRequest, ReleaseRequest, Status
from slimerl.spec.schema import ClusterSpec, ParallelSpec, SyncSpec
from slimerl.spec.survival import DeadlineSpec


@dataclass
class Desk:
    """The rollout role's side of a sync: hands out engines and keeps what it is told."""

    engines: list[EngineInfo]
    released: list[ReleaseRequest] = field(default_factory=list)

    def status(self) -> Status:
        return Status(0, 0, 0, 0, 0, {}, self.engines)

    def hold(self, request: HoldRequest) -> HoldReply:
        return HoldReply("lease", [one for one in self.engines if one.state is not EngineState.DEAD])

    def release(self, request: ReleaseRequest) -> None:
        self.released.append(request)


def shard_syncer(
    built: Any,
    desk: Desk | None,
    model_path: Path,
    parallel: ParallelSpec,
    engines: Sequence[EngineInfo],
    run_dir: Path,
    staged: bool,
    gpus_per_node: int = 8,
    sync_s: float = 300.0,
    transport: str = "shards",
) -> Any:
    from engine_fixtures import engine_spec

    from slimerl.training.weight_sync import build_syncer

    spec = engine_spec(model_path, run_dir, engines[0].tensor_parallel)
    changed = {
        "training": spec.training.model_copy(update={"parallel": parallel}),
        "sync": SyncSpec(transport=transport, staged=staged),
        "cluster": ClusterSpec(gpus_per_node=gpus_per_node),
        "deadlines": DeadlineSpec(start_s=min(sync_s, 240.0), sync_s=sync_s),
    }
    return build_syncer(spec.model_copy(update=changed), built.chunks, built.map, built.grid, desk)


def sync_shards(
    model_path: Path,
    parallel: ParallelSpec,
    engines: Sequence[EngineInfo],
    run_dir: Path,
    staged: bool,
    versions: Sequence[int],
    gpus_per_node: int = 8,
) -> Any:
    """On every rank: load the model into Megatron and sync it, version after version, each scaled a little; rank 0
    returns what it released and the phases of each."""
    built = tiny.build(model_path, parallel)
    desk = Desk(list(engines)) if built.grid.is_first else None
    syncer = shard_syncer(built, desk, model_path, parallel, engines, run_dir, staged, gpus_per_node)
    phases = []
    try:
        for number, version in enumerate(versions):
            if number:
                change(built.chunks)
            phases.append(syncer.sync(version))
    finally:
        syncer.close()
    return (desk.released, phases) if desk else None


def sync_by_each(
    model_path: Path,
    parallel: ParallelSpec,
    engines: Sequence[EngineInfo],
    run_dir: Path,
    transports: Sequence[tuple[str, bool]],
    version: int,
) -> list[ReleaseRequest] | None:
    """On every rank: one Megatron model, synced by one transport after the other, staged or not, each time with other
    weights and the next version; rank 0 returns what it released."""
    built = tiny.build(model_path, parallel)
    desk = Desk(list(engines)) if built.grid.is_first else None
    for transport, staged in transports:
        syncer = shard_syncer(built, desk, model_path, parallel, engines, run_dir, staged, transport=transport)
        try:
            # what these keep of the first sync serves the second
            for _ in range(2 if transport in ("delta", "shards") else 1):
                change(built.chunks)
                syncer.sync(version)
                version += 1
        finally:
            syncer.close()
    return desk.released if desk else None


def change(chunks: Any) -> None:
    """As a training step does, every weight."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(1.01)


def changed_logprobs(model_path: Path, tokens: list[int], changes: int = 1) -> torch.Tensor:
    """Megatron's log-probability of each token after its predecessors, [len(tokens) - 1], on one rank."""
    built = tiny.build(model_path, ParallelSpec())
    for _ in range(changes):
        change(built.chunks)
    with torch.no_grad():
        packed = tiny.plain_pack([len(tokens)])
        logits = built.chunks[0].eval()(torch.tensor([tokens]), None, None, packed_seq_params=packed)[0]
    logprobs = logits[: len(tokens) - 1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
