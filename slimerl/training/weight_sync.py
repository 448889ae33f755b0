"""The weight sync as the trainer uses it: the plan of this run, and who takes part.

Flows in: the spec, the model, the engines as the spec describes them. Flows out: a `WeightSyncer`.
Invariant: the ranks that hold the model once gather, the first of them (trainer rank 0) alone coordinates.
"""

from collections.abc import Sequence

import torch

from slimerl.resharding.sync import WeightControl, WeightSyncer
from slimerl.resharding.sync_plan import plan_sync
from slimerl.spec import RunSpec
from slimerl.training.engine_layout import engine_config, engine_form, engine_layout
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
    return WeightSyncer(
        plan,
        grid.holders,
        (lambda: named_parameters(chunks)) if grid.is_holder else None,
        control if grid.is_first else None,
        spec.deadlines.sync_s,
        spec.sync.transport,
        spec.run_dir,
    )
