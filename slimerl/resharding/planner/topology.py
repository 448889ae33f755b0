"""The machines of a sync: trainer GPUs, engine replicas on nodes, one network card (NIC) per GPU.

Flows in: sizes and speeds. Flows out: which NICs make a node and which nodes hold the same shards.
Invariant: NIC numbers: the trainer's ranks come first, then replica by replica the ranks of the engines.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.layouts import LayoutError, check_sizes

MOST_GPUS = 1 << 15
"""Of the trainer, of all engines, of a node. For a thousand engines of 32 a plan takes 14 s and 4 GB on every rank that
makes it, for half as many again 33 s and 5 GB."""


@dataclass(frozen=True)
class Topology:
    """Trainer and engines. Bandwidths are per GPU, in bytes per second and per direction (full duplex)."""

    trainer_ranks: int
    engine_ranks: int
    """Of one replica."""
    replicas: int
    gpus_per_node: int = 8
    nic_bytes_per_s: float = 50e9
    nvlink_bytes_per_s: float = 450e9
    dead: frozenset[int] = frozenset()
    """Replicas that a plan leaves out."""
    slow: tuple[tuple[int, float], ...] = ()
    """NICs that run below full speed: (number, fraction)."""

    def __post_init__(self) -> None:
        check_sizes(self)
        for speed in ("nic_bytes_per_s", "nvlink_bytes_per_s"):
            if not 0 < getattr(self, speed) < math.inf:
                raise LayoutError(f"{speed} = {getattr(self, speed)} must be a finite number above 0")
        small, large = sorted((self.engine_ranks, self.gpus_per_node))
        if large % small:
            raise LayoutError(
                f"an engine of {self.engine_ranks} GPUs on nodes of {self.gpus_per_node}: one must divide the other"
            )
        if len(self.dead - set(range(self.replicas))) or len(self.dead) >= self.replicas:
            raise LayoutError(f"dead engines {sorted(self.dead)} leave none of {self.replicas} replicas to sync")

    def check_scale(self) -> None:
        """Raises LayoutError where a plan would take more time and memory than ranks have."""
        engines = self.engine_ranks * self.replicas
        sides = {"the trainer": self.trainer_ranks, "all engines": engines, "a node": self.gpus_per_node}
        for side, gpus in sides.items():
            if gpus > MOST_GPUS:
                raise LayoutError(f"a sync is planned for up to {MOST_GPUS} GPUs of {side}, not {gpus}; use fewer")

    @property
    def nics(self) -> int:
        return self.trainer_ranks + self.engine_ranks * self.replicas

    @property
    def copies_per_node(self) -> int:
        """Replicas that share a node."""
        return max(1, self.gpus_per_node // self.engine_ranks)

    @property
    def classes(self) -> int:
        """Nodes of one replica: nodes of one class hold the same shards."""
        return max(1, self.engine_ranks // self.gpus_per_node)

    @property
    def slots(self) -> int:
        """GPUs that a node has for engines, where it is full."""
        return min(self.gpus_per_node, self.engine_ranks * self.copies_per_node)

    def class_and_slot(self, rank: int, copy: int = 0) -> tuple[int, int]:
        """Where rank `rank` of a replica stands, the replica being the `copy`-th of its node."""
        if self.classes > 1:
            return rank // self.slots, rank % self.slots
        return 0, copy * self.engine_ranks + rank

    def nic_speeds(self) -> NDArray[np.float64]:
        """[nics], bytes per second."""
        speeds = np.full(self.nics, self.nic_bytes_per_s)
        for nic, fraction in self.slow:
            speeds[nic] *= fraction
        return speeds


@dataclass(frozen=True)
class Nodes:
    """The engine nodes that a plan serves."""

    nic: NDArray[np.int64]
    """[members, classes, slots]: a NIC's number, -1 where the GPU is absent or its replica dead.

    The members of one class hold the same shards.
    """
    entry: NDArray[np.int64] = field(repr=False)
    """As `nic`, but an absent GPU's data enters by the NIC of a present one."""
    rings: tuple[NDArray[np.int64], ...]
    """The members in groups of about equal size; each group gets a copy of its own from the trainer."""

    @property
    def members(self) -> int:
        return int(self.nic.shape[0])

    @property
    def count(self) -> int:
        """Of all classes together."""
        return self.nic[:, :, 0].size

    def number_of(self, nics: int) -> NDArray[np.int64]:
        """[nics]: the node that each NIC belongs to, member by member, class by class; -1: to none (the trainer's)."""
        node = np.full(nics, -1, dtype=np.int64)
        present = self.nic >= 0
        numbers = np.arange(self.count).reshape((*self.nic.shape[:2], 1))
        node[self.nic[present]] = np.broadcast_to(numbers, self.nic.shape)[present]
        return node


def engine_nodes(topology: Topology, rings: int = 1) -> Nodes:
    """All nodes with a living replica, in `rings` rings (fewer where there are not as many nodes)."""
    copies, per_replica = topology.copies_per_node, topology.engine_ranks
    members = -(-topology.replicas // copies)
    by_replica = topology.trainer_ranks + np.arange(members * copies * per_replica).reshape(-1, per_replica)
    by_replica[[*range(topology.replicas, members * copies), *topology.dead]] = -1
    nic = by_replica.reshape(members, topology.classes, topology.slots)
    nic = nic[[bool((member >= 0).any()) for member in nic]]
    entry = nic.copy()
    for member, node, slot in zip(*np.nonzero(nic < 0), strict=True):
        present = nic[member, node][nic[member, node] >= 0]
        entry[member, node, slot] = present[slot % len(present)]
    return Nodes(nic, entry, tuple(np.array_split(np.arange(len(nic)), min(rings, len(nic)))))
