"""What a weight sync moves, as values: made once for a run, before the first byte.

Flows in: the model's `config.json`, its family, the trainer's layout, the engines' layout. Flows out: the tensors in
buckets and where they lie on either side. Invariant: the plan names each element of each tensor, on both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.buckets import aligned, split_into_buckets
from slimerl.resharding.families import Family
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.tensors import LogicalTensor, Placement


@dataclass(frozen=True)
class SyncPlan:
    tensors: list[LogicalTensor]
    """In the dtype in which they travel: the engine's."""
    buckets: list[list[LogicalTensor]]
    trainer_ranks: list[list[Placement]]
    """Of each rank of the group that gathers."""
    engine_ranks: list[list[Placement]]
    """Of each rank of one engine."""

    @property
    def largest_bucket_bytes(self) -> int:
        """Above the bound where a single tensor or fused group is."""
        return max(sum(aligned(tensor.nbytes) for tensor in bucket) for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of the model as it travels."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_sync(
    config: Mapping[str, Any],
    family: Family,
    trainer: MegatronLayout,
    gathering_ranks: Sequence[int],
    engine: EngineLayout,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> SyncPlan:
    """Plan the sync of whole tensors from one replica of the trainer to engines of one layout.

    Args:
        gathering_ranks: global trainer ranks that together hold the model once; the first of them sends.

    Raises:
        ConfigError, LayoutError, CoverageError: the model cannot be laid out like that; the message names the key.
    """
    tensors = family.logical_tensors(config, dtype)
    return SyncPlan(
        tensors=tensors,
        buckets=split_into_buckets(tensors, family.fused_groups(config), bucket_bytes),
        trainer_ranks=[family.megatron_placements(config, trainer, rank) for rank in gathering_ranks],
        engine_ranks=[family.engine_placements(config, engine, rank) for rank in range(engine.world_size)],
    )
