"""The weight sync as the trainer uses it: the plan of this run, and who takes part.

Flows in: the spec, the model, the engines as the spec describes them. Flows out: a `WeightSyncer`, or, for `shards`, a
`ShardSyncer`. Invariant: the ranks that hold the model once gather, or every rank sends what is its own; trainer rank 0
alone coordinates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slimerl.resharding.planner import SyncShape
from slimerl.resharding.shard_sync import ShardControl, ShardSyncer
from slimerl.resharding.shard_trainer import ShardModel
from slimerl.resharding.sync import WeightSyncer
from slimerl.resharding.sync_plan import SyncPlan, plan_sync
from slimerl.spec import RunSpec
from slimerl.training.engine_layout import engine_config, engine_form, engine_layout, sync_topology
from slimerl.training.parallel import Grid
from slimerl.training.weights import ModelMap, named_parameters

MIB = 2**20


def build_syncer(
    spec: RunSpec, chunks: Sequence[torch.nn.Module], where: ModelMap, grid: Grid, control: ShardControl | None
) -> WeightSyncer | ShardSyncer:
    """Called on every rank; `control` is the rollout role's client, needed on trainer rank 0 alone.

    Raises:
        ConfigError, LayoutError, CoverageError: trainer and engines cannot hold the same model.
    """
    served = engine_config(spec, where.config)
    plan = plan_sync(
        served,
        where.family,
        where.layout,
        grid.holder_ranks,
        engine_layout(spec.engine),
        {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.model.dtype],
        spec.sync.bucket_mib * MIB,
        engine_form=engine_form(served),
    )
    if spec.sync.transport == "shards":
        return _shard_syncer(spec, chunks, where, grid, control, plan, served)
    return WeightSyncer(
        plan,
        grid.holders,
        (lambda: named_parameters(chunks)) if grid.is_holder else None,
        control if grid.is_first else None,
        spec.deadlines.sync_s,
        spec.sync.transport,
        spec.run_dir,
    )


def _shard_syncer(
    spec: RunSpec,
    chunks: Sequence[torch.nn.Module],
    where: ModelMap,
    grid: Grid,
    control: ShardControl | None,
    plan: SyncPlan,
    served: Mapping[str, Any],
) -> ShardSyncer:
    trainer_ranks = [where.placements(rank) for rank in range(where.layout.world_size)]
    engine = engine_layout(spec.engine)

    def shape_of(engines: int) -> SyncShape:
        topology = sync_topology(where.layout.world_size, engine, engines, spec.cluster.gpus_per_node)
        return SyncShape(served, where.layout, engine, topology, plan.dtype, engine_form(served))

    return ShardSyncer(
        ShardModel(plan, trainer_ranks, shape_of),
        grid.rank,
        lambda: named_parameters(chunks),
        control if grid.is_first else None,
        _exchange,
        spec.deadlines.sync_s,
        spec.sync.staged,
    )


def _exchange(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
