"""The process grid of the trainer: who computes what, and the collectives of a step that are not Megatron's.

Flows in: the sizes of the grid. Flows out: initialised process groups and a `Grid`. Invariant: every rank calls
each function of this module at the same place of the program.
"""

import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slimerl.resharding.layouts import MegatronCoordinates
from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities
from slimerl.training.trainer_layout import grid_layout


@dataclass(frozen=True)
class Grid:
    """This rank's place. All ranks of one data-parallel index form a replica: they compute the same samples;
    the first of them is its leader."""

    rank: int
    place: MegatronCoordinates
    sizes: ParallelSpec
    device: torch.device
    replica: Any
    """Process group of this rank's replica."""
    leader: int
    """Global rank of this replica's leader."""
    context: Any
    """Process group over which the tokens of a pack are spread."""
    holder_ranks: list[int]
    """The ranks that together hold the model once (`MegatronLayout.holders`)."""
    holders: Any
    """Their process group; None on other ranks, and where there is only one holder."""

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def is_first(self) -> bool:
        """Rank 0 talks to the control service and writes the record of the run."""
        return self.rank == 0

    @property
    def is_holder(self) -> bool:
        return self.rank in self.holder_ranks

    @property
    def is_last_stage(self) -> bool:
        """The log-probabilities are known here."""
        return self.place.pipeline == self.sizes.pipeline - 1

    @property
    def speaks_for_replica(self) -> bool:
        """One rank of each replica reports what all ranks of the last stage know."""
        return self.is_last_stage and self.place.tensor == self.place.context == 0


def start(
    parallel: ParallelSpec,
    capabilities: Capabilities,
    device: torch.device,
    timeout_s: float,
    seed: int,
    store: dist.Store | None = None,
) -> Grid:
    """Create the process groups; torch.distributed may be initialised already (then its backend stays).

    Args: `store`: where the ranks meet; None: as the environment says.

    Raises:
        ValueError: the number of processes is not the grid's size.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        rank, ranks = (-1, -1) if store is None else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        dist.init_process_group(capabilities.backend, timeout=timeout, store=store, rank=rank, world_size=ranks)
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(
            f"{dist.get_world_size()} trainer processes run, but training.parallel wants {parallel.world_size} "
            "(tensor * context * pipeline * data): start torchrun with --nproc-per-node so that they agree"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    rank, layout = dist.get_rank(), grid_layout(parallel)
    place, holders = layout.coordinates(rank), layout.holders
    _check_place(place)
    replicas = [layout.replica(data) for data in range(parallel.data)]
    return Grid(
        rank=rank,
        place=place,
        sizes=parallel,
        device=device,
        replica=_own_group(replicas, rank, timeout),
        leader=replicas[place.data][0],
        context=parallel_state.get_context_parallel_group(),
        holder_ranks=holders,
        holders=_own_group([holders], rank, timeout) if len(holders) > 1 else None,
    )


def _own_group(groups: Sequence[list[int]], rank: int, timeout: datetime.timedelta) -> Any:
    """Create every group, in one order on every rank; returns the one that `rank` is in, or None."""
    made = [dist.new_group(members, timeout=timeout) for members in groups]
    return next((group for group, members in zip(made, groups, strict=True) if rank in members), None)


def _check_place(place: MegatronCoordinates) -> None:
    """The layouts that weights are moved by must be Megatron's own."""
    megatrons = MegatronCoordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_data=parallel_state.get_expert_data_parallel_rank(),
    )
    if megatrons != place:
        raise AssertionError(f"the layout places this rank at {place}, Megatron at {megatrons}")


def stop() -> None:
    """Destroy every process group. Safe to call when none was created."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_bytes(data: bytes | None, grid: Grid, source: int, group: Any = None) -> bytes:
    """The bytes of global rank `source`, on every rank of `group` (default: all); others pass None."""
    sending = grid.rank == source
    size = torch.tensor([len(data) if data is not None and sending else 0], dtype=torch.int64, device=grid.device)
    dist.broadcast(size, source, group=group)
    if sending:
        buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(grid.device)
    else:
        buffer = torch.empty(max(1, int(size)), dtype=torch.uint8, device=grid.device)
    dist.broadcast(buffer, source, group=group)
    return buffer.cpu().numpy().tobytes()[: int(size)]


def sum_and_max(sums: torch.Tensor, maxima: torch.Tensor, counts_here: bool) -> tuple[list[float], list[float]]:
    """Add up and maximise over all ranks; `counts_here`: only ranks that say so contribute to the sums."""
    sums = sums.double() if counts_here else torch.zeros_like(sums, dtype=torch.float64)
    maxima = maxima.double()
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return sums.tolist(), maxima.tolist()


def anywhere(flag: bool, grid: Grid) -> bool:
    """Does any rank say so? A collective of all."""
    said = torch.tensor([int(flag)], device=grid.device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())
