"""A plan as orders: for every member of a sync, its steps in due order and the boxes of its parcels.

Flows in: a `Plan`. Flows out: arrays and JSON for `engine/inside/{carry,parcels}.py`. Members are NIC numbers: the
trainer's ranks, then replica by replica the ranks of the engines. Pure. Invariant: the steps of all members are one
total order (rounds; within one, what enters a node before what fans out in it), so that carrying them cannot lock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from slimerl.engine.inside.parcels import encode
from slimerl.resharding.planner import Plan, Share, engine_share
from slimerl.resharding.planner.templates import IntArray
from slimerl.resharding.shard_quantise import wire_name
from slimerl.resharding.tensors import LogicalTensor, Placement


@dataclass(frozen=True)
class Transfers:
    """Every parcel from one member to another, in one total order."""

    sender: IntArray
    receiver: IntArray
    parcel: IntArray
    nbytes: IntArray

    @cached_property
    def by_member(self) -> tuple[IntArray, IntArray]:
        """Transfers grouped by member, those that it sends and those that it receives: order and offsets. (Numbers from
        the count of transfers on are those of a receiver.)"""
        member = np.r_[self.sender, self.receiver]
        order = np.lexsort((np.arange(len(member)) % len(self.sender), member))
        return order, np.r_[0, np.cumsum(np.bincount(member))]


def transfers_of(plan: Plan) -> Transfers:
    """The plan's operations, and behind each the copies to the other GPUs of the node that want the parcel."""
    operations, parcels = plan.operations, plan.parcels
    place = np.full((plan.topology.nics, 3), -1)
    present = np.argwhere(plan.nodes.nic >= 0)
    place[plan.nodes.nic[tuple(present.T)]] = present
    member, node, slot = place[operations.receiver].T
    wanted = parcels.routes[parcels.route[operations.parcel], node]
    wanted[np.arange(len(wanted)), slot] = False
    mates = plan.nodes.nic[member, node]
    operation, mate = np.nonzero(wanted & (mates >= 0))
    sender = np.r_[operations.sender, operations.receiver[operation]].astype(np.int64)
    receiver = np.r_[operations.receiver, mates[operation, mate]].astype(np.int64)
    parcel = np.r_[operations.parcel, operations.parcel[operation]].astype(np.int64)
    due = np.r_[operations.round, operations.round[operation]].astype(np.int64)
    inside = np.r_[np.zeros(len(operations.sender)), np.ones(len(operation))]
    order = np.lexsort((receiver, sender, parcel, inside, due))
    sender, receiver, parcel = sender[order], receiver[order], parcel[order]
    return Transfers(sender, receiver, parcel, parcels.nbytes[parcel])


def steps_of(transfers: Transfers, member: int) -> IntArray:
    """[steps, 4]: sends (0 or 1), peer, parcel, bytes."""
    order, begins = transfers.by_member
    if member + 1 >= len(begins):
        return np.empty((0, 4), dtype=np.int64)
    numbers = order[begins[member] : begins[member + 1]]
    mine, sends = numbers % len(transfers.sender), numbers < len(transfers.sender)
    peer = np.where(sends, transfers.receiver[mine], transfers.sender[mine])
    return np.stack([sends.astype(np.int64), peer, transfers.parcel[mine], transfers.nbytes[mine]], axis=1)


def member_of(plan: Plan, replica: int, rank: int) -> int:
    """The number of an engine's rank."""
    return plan.topology.trainer_ranks + replica * plan.topology.engine_ranks + rank


def share_message(plan: Plan, share: Share) -> dict[str, Any]:
    """What `Contents.of` reads: the boxes of a rank's parcels."""
    segments = share.segments
    columns = (
        segments.parcel, segments.offset, segments.parameter, segments.slice,
        segments.row, segments.rows, segments.column, segments.columns,
    )  # fmt: skip
    parcel = np.unique(segments.parcel)
    sizes = np.stack([parcel, plan.parcels.nbytes[parcel]], axis=1)
    names = [wire_name(name, scales) for name, scales in zip(share.names, share.scales, strict=True)]
    return {"names": names, "parcels": text(sizes), "segments": text(np.stack(columns, axis=1))}


def engine_message(
    plan: Plan,
    replica: int,
    rank: int,
    placements: Sequence[Placement],
    tensors: Mapping[str, LogicalTensor],
    granules: Mapping[str, int],
) -> dict[str, Any]:
    """An engine rank's boxes, and what it must hold afterwards, for the digest."""
    wire = [
        placement.message(None, None)
        if placement.is_padding
        else placement.message(tensors[placement.tensor].shape, granules[placement.tensor])
        for placement in placements
    ]
    return share_message(plan, engine_share(plan, replica, rank)) | {"placements": wire}


def text(values: IntArray) -> str:
    return encode(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)))
