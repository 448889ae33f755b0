"""Copies of a rank's part on other nodes: made with the save, and brought back where a node was lost.

Flows in: the parts of a group of ranks, one of each of `checkpoint.local_copies` nodes. Flows out: all of them on each.
Invariant: what is brought back is what was digested when it was written.

nvidia-resiliency-ext's replication strategy makes the copies, which it also does over gloo. Bringing them back it takes
CUDA for granted, sends what it has read without a proof, and writes nothing: here the file itself travels.
"""

import datetime
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from slimerl.spec import RunSpec
from slimerl.training.checkpoint import directory, local
from slimerl.training.checkpoint.directory import Damaged, Entry, Manifest

_CHUNK_BYTES = 64 << 20


class Copies:
    """Of one rank."""

    def __init__(self, spec: RunSpec) -> None:
        """Called on every rank. Raises ImportError: nvidia-resiliency-ext is not installed."""
        from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import parse_group_sequence
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        # a rank that fails in the middle of a copy must not hold up the others for as long as a batch may take
        timeout = datetime.timedelta(seconds=spec.deadlines.checkpoint_s)
        members = parse_group_sequence(
            replication_jump=spec.cluster.gpus_per_node,
            replication_factor=spec.checkpoint.local_copies,
            world_size=dist.get_world_size(),
        )
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
        [own] = [group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks]
        self._strategy = CliqueReplicationStrategy(own, target_device="cpu")

    def of(self, part: Any) -> dict[int, Any]:
        """Owner → part, of all ranks of the group, on the host."""
        parts, owners = self._strategy.replicate(part, dist.get_rank())
        return dict(zip(owners, parts, strict=True))


@dataclass(frozen=True)
class Move:
    """A part that its owner has not got, and who has it."""

    owner: int
    holder: int
    entry: Entry


def fetch(root: Path, manifest: Manifest, moves: Sequence[Move], device: torch.device) -> None:
    """Bring the parts to their owners, whose checkpoint is whole then; called on every rank.

    Raises:
        OSError, Damaged: on the rank that cannot.
    """
    rank, step = dist.get_rank(), manifest.step
    for move in moves:
        name = local.part_name(move.owner)
        if rank == move.holder:
            _send(directory.complete_path(root, step) / name, move, device)
        elif rank == move.owner:
            partial = directory.start_partial(root, step)
            _receive(partial / name, move, device)
            directory.write_manifest(partial, msgspec.structs.replace(manifest, files={name: move.entry}))
    if rank in {move.owner for move in moves}:
        # not before: others may have got their parts from there
        shutil.rmtree(directory.complete_path(root, step), ignore_errors=True)
        directory.complete(root, step)


def _sizes(move: Move) -> list[int]:
    whole, rest = divmod(move.entry.bytes, _CHUNK_BYTES)
    return [_CHUNK_BYTES] * whole + [rest] * bool(rest)


def _send(path: Path, move: Move, device: torch.device) -> None:
    with path.open("rb") as file:
        for size in _sizes(move):
            # who waits for it gets as much as was announced, and sees by the digest what is wrong
            chunk = bytearray(file.read(size).ljust(size, b"\0"))
            dist.send(torch.frombuffer(chunk, dtype=torch.uint8).to(device), move.owner)


def _receive(path: Path, move: Move, device: torch.device) -> None:
    with path.open("wb") as file:
        for size in _sizes(move):
            chunk = torch.empty(size, dtype=torch.uint8, device=device)
            dist.recv(chunk, move.holder)
            file.write(chunk.cpu().numpy().tobytes())
        directory.flush(file)
    if directory.entry_of(path) != move.entry:
        raise Damaged(f"the part that rank {move.holder} sent has changed (digest)")
