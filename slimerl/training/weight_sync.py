"""The weight sync as the trainer uses it: the plan of this run, and who takes part.

Flows in: the spec, the model, the engines as the spec describes them. Flows out: a `WeightSyncer`.
Invariant: the first replica gathers, its leader (trainer rank 0) alone coordinates.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slimerl.resharding.layouts import EngineLayout
from slimerl.resharding.sync import WeightControl, WeightSyncer
from slimerl.resharding.sync_plan import plan_sync
from slimerl.spec import RunSpec
from slimerl.training.parallel import Grid
from slimerl.training.weights import ModelMap, named_parameters

MIB = 2**20


def build_syncer(
    spec: RunSpec, chunks: Sequence[torch.nn.Module], where: ModelMap, grid: Grid, control: WeightControl | None
) -> WeightSyncer:
    """Called on every rank; `control` is the rollout role's client, needed on trainer rank 0 alone.

    Raises:
        ConfigError, LayoutError, CoverageError: trainer and engines cannot hold the same model.
    """
    gathers = grid.data_rank == 0
    # the first replica's ranks: equal on every rank, as the plan must be
    members = [rank for rank in range(spec.training.parallel.world_size) if where.layout.coordinates(rank).data == 0]
    plan = plan_sync(
        where.config,
        where.family,
        where.layout,
        members,
        EngineLayout(tensor=spec.engine.tensor_parallel),
        {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.model.dtype],
        spec.sync.bucket_mib * MIB,
    )
    if gathers and members != dist.get_process_group_ranks(grid.replica):
        raise AssertionError(f"the layout says that ranks {members} hold the first replica, Megatron says otherwise")
    return WeightSyncer(
        plan,
        grid.replica if gathers and len(members) > 1 else None,
        (lambda: named_parameters(chunks)) if gathers else None,
        control if grid.is_first else None,
        spec.deadlines.sync_s,
        spec.sync.transport,
    )
