"""The process grid of the trainer: who computes what, and the collectives of a step that are not Megatron's.

Flows in: the sizes of the grid. Flows out: initialised process groups and a `Grid`. Invariant: every rank calls
each function of this module at the same place of the program.
"""

import datetime
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities


@dataclass(frozen=True)
class Grid:
    """This rank's place. All ranks of one data-parallel index form a replica: they hold one copy of the model
    and compute the same samples; the first of them is its leader."""

    rank: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    device: torch.device
    replica: Any
    """Process group of this rank's replica."""
    leader: int
    """Global rank of this replica's leader."""

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    @property
    def is_first(self) -> bool:
        """Rank 0 talks to the control service and writes the record of the run."""
        return self.rank == 0


def start(
    parallel: ParallelSpec, capabilities: Capabilities, device: torch.device, timeout_s: float, seed: int
) -> Grid:
    """Create the process groups; torch.distributed may be initialised already (then its backend stays).

    Raises:
        ValueError: the number of processes is not the grid's size.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(capabilities.backend, timeout=timeout)
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(
            f"{dist.get_world_size()} trainer processes run, but training.parallel wants {parallel.world_size} "
            "(tensor * context * pipeline * data): start torchrun with --nproc-per-node so that they agree"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor, distributed_timeout_minutes=math.ceil(timeout_s / 60)
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    replica = parallel_state.get_model_parallel_group()
    return Grid(
        rank=dist.get_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        device=device,
        replica=replica,
        leader=dist.get_process_group_ranks(replica)[0],
    )


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
