"""Weights between a Hugging Face checkpoint and the model chunks of this rank.

Flows in: a checkpoint directory, the chunks. Flows out: filled parameters; a new checkpoint directory. The mapping
itself is `slimerl.resharding`'s: one table per family serves loading, export and the weight sync.
Invariant: loading and exporting without a step between gives the same tensors, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimerl.resharding.assemble import scatter
from slimerl.resharding.buckets import split_into_buckets
from slimerl.resharding.families import Family, family_of
from slimerl.resharding.gather import Gather
from slimerl.resharding.hf_checkpoint import HfCheckpoint, check_keys, write_checkpoint
from slimerl.resharding.layouts import MegatronLayout, ModuleNames
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.model import unwrapped
from slimerl.training.parallel import Grid

EXPORT_BUCKET_BYTES = 256 * 2**20
"""Gathered at once while exporting."""


@dataclass(frozen=True)
class ModelMap:
    """Where every part of the model lies, on every rank of the trainer."""

    config: Mapping[str, Any]
    family: Family
    layout: MegatronLayout

    def vocabulary_rows(self, vocabulary: int) -> int:
        """Rows of the embedding over all ranks, padding included."""
        return self.layout.padded_vocabulary(vocabulary)

    def placements(self, rank: int) -> list[Placement]:
        return self.family.megatron_placements(self.config, self.layout, rank)

    def logical_tensors(self, dtype: torch.dtype | None = None) -> list[LogicalTensor]:
        return self.family.logical_tensors(self.config, dtype)


def model_map(config: Mapping[str, Any], parallel: ParallelSpec, capabilities: Capabilities) -> ModelMap:
    """The map of the model of this `config.json`. Raises ConfigError or LayoutError, naming the key."""
    layout = MegatronLayout(
        tensor=parallel.tensor,
        data=parallel.data,
        # GPUs multiply matrices of such widths faster
        vocabulary_multiple=128 if capabilities.cuda else 1,
        names=ModuleNames.TRANSFORMER_ENGINE if capabilities.transformer_engine else ModuleNames.LOCAL,
    )
    return ModelMap(config, family_of(config), layout)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters under the names that placements use: wrappers left out, `model1.` for chunk 1 of many."""
    prefixes = [""] if len(chunks) == 1 else [f"model{index}." for index in range(len(chunks))]
    return {
        prefix + name: parameter
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: Path, where: ModelMap, rank: int) -> None:
    """Fill every parameter of this rank; a checkpoint of another dtype is converted.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    with HfCheckpoint(checkpoint) as tensors:
        check_keys(tensors, where.logical_tensors(), where.family.aliases(where.config))
        scatter(where.placements(rank), tensors, named_parameters(chunks), cast=True)


def export_weights(
    chunks: Sequence[torch.nn.Module],
    destination: Path,
    source: Path,
    where: ModelMap,
    grid: Grid,
    bucket_bytes: int = EXPORT_BUCKET_BYTES,
) -> None:
    """Write the model as a Hugging Face checkpoint in its own dtype, with the other files of checkpoint `source`.

    The first replica gathers, its leader writes; the others have nothing to do. An existing `destination` is
    replaced once the new one is complete.
    """
    if grid.data_rank != 0:
        return
    parameters = named_parameters(chunks)
    dtype = next(iter(parameters.values())).dtype
    members = dist.get_process_group_ranks(grid.replica)
    gather = Gather(
        [where.placements(rank) for rank in members],
        split_into_buckets(where.logical_tensors(dtype), where.family.fused_groups(where.config), bucket_bytes),
        grid.replica if len(members) > 1 else None,
    )
    tensors = (pair for bucket in gather.run(parameters) for pair in bucket)
    if grid.is_leader:
        write_checkpoint(destination, tensors, source, overwrite=True)
    else:
        for _ in tensors:
            raise AssertionError("only the first rank of a group receives tensors")
