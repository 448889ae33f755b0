"""What a weight sync moves, as values: made once for a run, before the first byte.

Flows in: the model's `config.json`, its family, the trainer's layout, the engines' layout. Flows out: the tensors in
buckets and where they lie on either side. Invariant: the plan names each element of each tensor, on both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from slimerl.resharding.buckets import aligned, split_into_buckets
from slimerl.resharding.coverage import CoverageError, some_names
from slimerl.resharding.families import BlockScales, Family, Form
from slimerl.resharding.families.family import PLAIN
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.quantise import FP8
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
    kept_back: frozenset[str] = frozenset()
    """Tensors that the trainer has and the engines do not: the multi-token-prediction layer."""
    scales: BlockScales | None = None
    """The engines hold matrices in FP8, which are made of the gathered ones."""
    dtype: torch.dtype = torch.bfloat16
    """In which matrices are gathered that then become FP8."""

    @property
    def gathered(self) -> list[list[LogicalTensor]]:
        """The buckets as the trainer's ranks fill them: whole matrices in place of FP8 data and scales."""
        if self.scales is None:
            return self.buckets
        quantised = {tensor.name for tensor in self.tensors if tensor.dtype == FP8}
        scales = set(map(scale_name, quantised))
        return [
            [replace(tensor, dtype=self.dtype) if tensor.name in quantised else tensor
             for tensor in bucket if tensor.name not in scales]
            for bucket in self.buckets
        ]  # fmt: skip

    @cached_property
    def by_name(self) -> dict[str, LogicalTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

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
    trainer_form: Form = PLAIN,
    engine_form: Form = PLAIN,
) -> SyncPlan:
    """Plan the sync of whole tensors from one replica of the trainer to engines of one layout.

    Args:
        gathering_ranks: global trainer ranks that together hold the model once; the first of them sends.
        trainer_form, engine_form: which tensors of the model either side holds.

    Raises:
        ConfigError, LayoutError, CoverageError: the model cannot be laid out like that; the message names the key.
    """
    tensors = family.logical_tensors(config, dtype, engine_form)
    sent = {tensor.name for tensor in tensors}
    held = {tensor.name for tensor in family.logical_tensors(config, form=trainer_form)}
    made = {scale_name(tensor.name) for tensor in tensors if tensor.dtype == FP8}
    if missing := sent - held - made:
        raise CoverageError(f"the engines hold tensors that the trainer does not: {some_names(missing)}")
    return SyncPlan(
        tensors=tensors,
        buckets=split_into_buckets(tensors, family.fused_groups(config, engine_form), bucket_bytes),
        trainer_ranks=[family.megatron_placements(config, trainer, rank, trainer_form) for rank in gathering_ranks],
        engine_ranks=[family.engine_placements(config, engine, rank, engine_form) for rank in range(engine.world_size)],
        kept_back=frozenset(held - sent),
        scales=engine_form.scales,
        dtype=dtype,
    )
