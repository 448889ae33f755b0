"""Lower bounds of a sync's time: no plan for these owners, demands and links is faster.

Flows in: atoms, speeds. Flows out: seconds. Invariant: each bound counts bytes that must pass a group of links, over
the speed of the group; nothing of the plan enters.
"""

from dataclasses import dataclass

import numpy as np

from slimerl.resharding.planner.atoms import Atoms
from slimerl.resharding.planner.ranks import some
from slimerl.resharding.planner.topology import Nodes, Topology
from slimerl.resharding.planner.waterfill import FloatArray


@dataclass(frozen=True)
class Bounds:
    """In seconds."""

    egress_s: float
    """Trainer NICs: what only some ranks own, over their speed, one copy of everything."""
    ingress_s: float
    """NICs of the fullest engine node: one copy of all that its GPUs want."""
    fan_out_s: float
    """NVLink of that node: what GPUs want beyond the copy that came in."""

    @property
    def seconds(self) -> float:
        return max(self.egress_s, self.ingress_s, self.fan_out_s)

    @property
    def binding(self) -> str:
        """Which side the bound comes from."""
        names = {"trainer": self.egress_s, "engine": self.ingress_s, "nvlink": self.fan_out_s}
        return max(names, key=lambda name: names[name])


def ingress_bound(atoms: Atoms, nodes: Nodes, speeds: FloatArray) -> float:
    """`speeds`: [NICs]. A node takes in what its GPUs want once, by the NICs of those that are there."""
    wanted = some(atoms.demands, 2)
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(wanted))
    by_node = np.where(nodes.nic >= 0, speeds[nodes.nic], 0.0).sum(axis=2)
    return float((entering @ wanted / by_node.min(axis=0)).max())


def fan_out_bound(atoms: Atoms, nodes: Nodes, nvlink_bytes_per_s: float) -> float:
    """What a node's GPUs want beyond one copy has to come from a neighbour, over the NVLink of all of them."""
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(atoms.demands))
    most = 0.0
    # engines are whole, so that nodes differ in a few ways at most
    for present in np.unique(nodes.nic >= 0, axis=0):
        takers = (atoms.demands & present).sum(axis=2)
        beyond = entering @ np.maximum(takers - 1, 0)
        most = max(most, float((beyond / present.sum(axis=1)).max()))
    return most / nvlink_bytes_per_s


def colocated_ingress_bound(atoms: Atoms, topology: Topology) -> float:
    """Engines on the trainer's own GPUs (GPU g has trainer rank g and rank g % engine_ranks of replica
    g // engine_ranks): a node takes in once, by all its NICs, what its engines want and none of its trainer ranks has.
    """
    per_node, ranks = topology.gpus_per_node, topology.engine_ranks
    gpus = ranks * topology.replicas
    count = -(-gpus // per_node)
    held = np.zeros((len(atoms.owners), count * per_node), dtype=bool)
    known = min(held.shape[1], atoms.owners.shape[1])
    held[:, :known] = atoms.owners[:, :known]
    held_by_node = some(held.reshape(-1, count, per_node), 2)
    node = np.arange(count)
    wanted_by_node = some(atoms.demands, 2)[:, node % topology.classes]
    pair, where = np.unique(np.stack([atoms.owner, atoms.demand]), axis=1, return_inverse=True)
    nbytes = np.bincount(where.reshape(-1), weights=atoms.nbytes)
    entering = nbytes @ (wanted_by_node[pair[1]] & ~held_by_node[pair[0]])
    return float(entering.max() / (per_node * topology.nic_bytes_per_s))
