"""The plan of a sync: what every rank sends, passes on and stores, in which order.

Flows in: a model's table, two layouts, a topology. Flows out: `Plan`, a handful of arrays from which every rank selects
its share. Invariant: `check_cover` holds for every plan that `make_plan` returns: each destination byte is written
exactly once.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.planner.atoms import Atoms
from slimerl.resharding.planner.bounds import Bounds
from slimerl.resharding.planner.parcels import Fragments, Parcels
from slimerl.resharding.planner.ranks import RankTable
from slimerl.resharding.planner.records import Records
from slimerl.resharding.planner.rings import Turns, hops_to_feeder
from slimerl.resharding.planner.shape import SyncShape
from slimerl.resharding.planner.templates import IntArray, Signatures
from slimerl.resharding.planner.topology import Nodes, Topology

Int32Array = NDArray[np.int32]


class Operations(NamedTuple):
    """Every network operation: one parcel from one NIC to another. Sorted by round."""

    sender: Int32Array
    receiver: Int32Array
    parcel: Int32Array
    round: Int32Array
    after: Int32Array
    """The operation that brings the sender the parcel; -1: the sender is its trainer."""
    node: Int32Array
    """The class of the receiver's node."""


@dataclass(frozen=True)
class PlanTemplate:
    """The part of a plan that neither nodes nor replicas enter: who owns, who wants, who sends."""

    model: Signatures
    train: RankTable
    engine: RankTable
    records: Records
    atoms: Atoms
    bounds: Bounds
    relay_classes: bool
    """The trainers inject one copy, not one for each class of nodes."""
    rings: int
    """Copies of each parcel that the trainers inject, each into a ring of its own."""
    fragments: Fragments
    """Not yet in parcels."""


@dataclass(frozen=True)
class Plan:
    """What `make_plan` returns. All arrays are read only."""

    shape: SyncShape
    template: PlanTemplate
    nodes: Nodes
    fragments: Fragments
    parcels: Parcels
    slot: IntArray
    """[parcels]: the NIC of a node by which it enters."""
    turns: Turns
    operations: Operations

    @property
    def topology(self) -> Topology:
        return self.shape.topology

    @cached_property
    def digest(self) -> str:
        """Of what the ranks do. Trainer and engines compare it before the first byte."""
        arrays = (*self.operations, *vars(self.template.records).values(), *vars(self.template.atoms).values())
        found = hashlib.sha256()
        for array in (*arrays, *vars(self.fragments).values(), *vars(self.parcels).values(), self.slot):
            if isinstance(array, np.ndarray):
                found.update(f"{array.dtype}{array.shape}".encode())
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:32]

    @cached_property
    def nic_bytes(self) -> tuple[IntArray, IntArray]:
        """Bytes sent and received by each NIC."""
        nbytes = self.parcels.nbytes[self.operations.parcel]
        count = self.topology.nics
        sent = np.bincount(self.operations.sender, weights=nbytes, minlength=count)
        received = np.bincount(self.operations.receiver, weights=nbytes, minlength=count)
        return sent.astype(np.int64), received.astype(np.int64)

    @cached_property
    def nic_operations(self) -> tuple[IntArray, IntArray]:
        """Operations sent and received by each NIC."""
        count = self.topology.nics
        return (
            np.bincount(self.operations.sender, minlength=count),
            np.bincount(self.operations.receiver, minlength=count),
        )

    @cached_property
    def parcel_of_fragment(self) -> IntArray:
        return np.repeat(np.arange(len(self.parcels)), np.diff(self.parcels.first_fragment))

    @cached_property
    def offset_of_fragment(self) -> IntArray:
        """Where it begins in its parcel, in bytes."""
        nbytes = self.fragments.nbytes(self.template.atoms)
        begins = np.cumsum(nbytes) - nbytes
        return begins - begins[self.parcels.first_fragment[:-1]][self.parcel_of_fragment]

    @property
    def rounds(self) -> int:
        return int(self.operations.round.max(initial=-1)) + 1

    @cached_property
    def by_sender(self) -> tuple[IntArray, IntArray]:
        """Operations grouped by sender: order and offsets [nics + 1]."""
        return _grouped(self.operations.sender, self.topology.nics)

    @cached_property
    def by_receiver(self) -> tuple[IntArray, IntArray]:
        return _grouped(self.operations.receiver, self.topology.nics)


def _grouped(of: Int32Array, count: int) -> tuple[IntArray, IntArray]:
    order = np.argsort(of, kind="stable")
    return order, np.r_[0, np.cumsum(np.bincount(of, minlength=count))]


def spell_operations(parcels: Parcels, turns: Turns, nodes: Nodes) -> Operations:
    """Every hop of every turn, sorted by round."""
    parts = [_hops(parcels, turns, nodes, group) for group in range(len(nodes.rings))]
    first = np.cumsum([0, *(len(part.sender) for part in parts)])
    after = [
        np.where(part.after < 0, np.int32(-1), part.after + offset) for part, offset in zip(parts, first, strict=False)
    ]
    together = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    order = np.argsort(together[Operations._fields.index("round")], kind="stable")
    moved = np.empty(len(order), dtype=np.int32)
    moved[order] = np.arange(len(order), dtype=np.int32)
    before = np.concatenate(after)[order]
    columns = dict(zip(Operations._fields, (column[order] for column in together), strict=True))
    return Operations(**columns | {"after": np.where(before < 0, np.int32(-1), moved[before])})


def _hops(parcels: Parcels, turns: Turns, nodes: Nodes, group: int) -> Operations:
    """The operations of one group of rings, turn by turn; `after` counts within them."""
    ring = nodes.rings[group]
    length = len(ring)
    mine = np.flatnonzero(turns.group == group)
    place = np.full(len(turns), -1)
    place[mine] = np.arange(len(mine))
    head, node, parcel = turns.head[mine], turns.node[mine], turns.parcel[mine]
    hop = np.arange(length)[None, :]
    receiver = nodes.entry[ring[(head[:, None] + hop) % length], node[:, None], turns.slot[mine][:, None]].astype(
        np.int32
    )
    index = np.arange(receiver.size, dtype=np.int32).reshape(receiver.shape)
    sender, after = np.empty_like(receiver), np.empty_like(index)
    sender[:, 1:], after[:, 1:] = receiver[:, :-1], index[:, :-1]
    sender[:, 0], after[:, 0] = parcels.root[parcel], -1
    fed = np.flatnonzero(turns.feeder[mine] >= 0)
    feeder = place[turns.feeder[mine][fed]]
    distance = hops_to_feeder(head[fed], head[feeder], length)
    sender[fed, 0], after[fed, 0] = receiver[feeder, distance], index[feeder, distance]
    return Operations(
        sender.ravel(),
        receiver.ravel(),
        np.repeat(parcel, length).astype(np.int32),
        (turns.round[mine][:, None] + hop).astype(np.int32).ravel(),
        after.ravel(),
        np.repeat(node, length).astype(np.int32),
    )
