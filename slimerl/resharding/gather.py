"""Gathering full logical tensors from the ranks that hold their parts.

Flows in: the placements of every rank of a group, the local parameters. Flows out, on the group's first rank: bucket
by bucket, the full logical tensors; elsewhere as many empty buckets.
Invariant: each element comes from its one owner, and no other byte travels: a rank that owns nothing of a bucket (of
another pipeline stage) takes no part in it. All ranks enter together, and each sends its parts in the buckets' order.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from slimerl.resharding.buckets import aligned, bucket_offsets
from slimerl.resharding.coverage import check_parameters, owned_placements
from slimerl.resharding.tensors import LogicalTensor, Placement


@dataclass
class _Share:
    """What one rank sends of a bucket: placements and where they begin in its flat buffer, in bytes."""

    pieces: list[tuple[Placement, int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, placement: Placement, itemsize: int) -> None:
        self.pieces.append((placement, self.nbytes))
        self.nbytes += aligned(placement.box.numel * itemsize)


class Gather:
    """Made once for a layout; `run` for each sync.

    Example, on every rank of a tensor-parallel group::

        ranks = [family.megatron_placements(config, layout, rank) for rank in dist.get_process_group_ranks(group)]
        gather = Gather(ranks, split_into_buckets(tensors, family.fused_groups(config), bucket_bytes), group)
        for bucket in gather.run(dict(model.named_parameters())):
            ...  # [(name, tensor), ...] on the first rank, [] elsewhere
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Placement]],
        buckets: Sequence[Sequence[LogicalTensor]],
        group: dist.ProcessGroup | None = None,
        kept_back: Collection[str] = (),
    ) -> None:
        """Args:
            ranks: placements of each rank of the group, in its order.
            group: None for a group of one.
            kept_back: tensors that the ranks hold and that are in no bucket.

        Raises:
            CoverageError: the ranks together leave a part of a tensor out.
            ValueError: the group is of another size.
        """
        size, self._rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        if size != len(ranks):
            raise ValueError(f"the group has {size} ranks, placements are given for {len(ranks)}")
        self._group, self._buckets = group, [list(bucket) for bucket in buckets]
        self._mine = list(ranks[self._rank])
        self._tensors = {tensor.name: tensor for bucket in buckets for tensor in bucket}
        bucket_of = {tensor.name: number for number, bucket in enumerate(buckets) for tensor in bucket}
        self._shares = [[_Share() for _ in ranks] for _ in buckets]
        kept_back = frozenset(kept_back)
        wanted = [[place for place in placements if place.tensor not in kept_back] for placements in ranks]
        for rank, placements in enumerate(owned_placements(wanted, list(self._tensors.values()))):
            for placement in placements:
                share = self._shares[bucket_of[placement.tensor]][rank]
                share.add(placement, self._tensors[placement.tensor].dtype.itemsize)

    def run(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """One list for each bucket; all ranks must take all of them, or the others wait for the group's timeout.

        Values are converted to the dtype of the logical tensor before they travel. The tensors of a bucket are
        views of one new buffer on the parameters' device.

        Raises:
            CoverageError: the parameters are not those of the placements. Nothing has been sent then.
        """
        check_parameters(self._mine, {name: tuple(tensor.shape) for name, tensor in parameters.items()})
        device = next(iter(parameters.values())).device
        if self._group is not None:
            # NCCL wants all ranks at a group's first operation, and a rank may own nothing of the first buckets.
            dist.barrier(self._group)
        for bucket, shares in zip(self._buckets, self._shares, strict=True):
            received = self._exchange(shares, parameters, device)
            yield self._assemble(bucket, shares, received, device) if self._rank == 0 else []

    def _exchange(
        self, shares: list[_Share], parameters: Mapping[str, torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """The flat buffers of all ranks, on the first one; elsewhere this rank's own, once it is sent."""
        own = shares[self._rank]
        sent = torch.empty(own.nbytes, dtype=torch.uint8, device=device)
        with torch.no_grad():
            for placement, offset in own.pieces:
                self._view(sent, placement, offset).copy_(placement.view_of(parameters[placement.parameter]))
        if self._group is None:
            return [sent]
        if self._rank != 0:
            if own.nbytes:
                _exchange([dist.P2POp(dist.isend, sent, group=self._group, group_peer=0)])
            return [sent]
        buffers = [sent, *(torch.empty(share.nbytes, dtype=torch.uint8, device=device) for share in shares[1:])]
        _exchange(
            [
                dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=rank)
                for rank, buffer in enumerate(buffers)
                if rank and buffer.numel()
            ]
        )
        return buffers

    def _view(self, buffer: torch.Tensor, placement: Placement, offset: int) -> torch.Tensor:
        dtype = self._tensors[placement.tensor].dtype
        part = buffer[offset : offset + placement.box.numel * dtype.itemsize]
        return part.view(dtype).view(placement.box.shape)

    def _assemble(
        self,
        bucket: list[LogicalTensor],
        shares: list[_Share],
        received: list[torch.Tensor],
        device: torch.device,
    ) -> list[tuple[str, torch.Tensor]]:
        offsets, size = bucket_offsets(bucket)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        full = {
            tensor.name: buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(bucket, offsets, strict=True)
        }
        for share, flat in zip(shares, received, strict=True):
            for placement, offset in share.pieces:
                full[placement.tensor][placement.box.slices].copy_(self._view(flat, placement, offset))
        return list(full.items())


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
