"""Lower bounds of a sync's time: no plan for these owners, demands and links is faster.

Flows in: atoms, speeds. Flows out: seconds. Invariant: each bound counts bytes that must pass a group of links, over
the speed of the group; nothing of the plan enters.
"""

from dataclasses import dataclass

import numpy as np

from slimerl.resharding.planner.atoms import Atoms
from slimerl.resharding.planner.ranks import some
from slimerl.resharding.planner.topology import Topology
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


def ingress_bound(atoms: Atoms, speeds: FloatArray) -> float:
    """`speeds`: [classes, slots]. A node takes in what its GPUs want once, by all its NICs."""
    nodes = some(atoms.demands, 2)
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(nodes))
    return float((entering @ nodes / speeds.sum(axis=1)).max())


def fan_out_bound(atoms: Atoms, topology: Topology) -> float:
    """What a node's GPUs want beyond one copy has to come from a neighbour, over the NVLink of all of them."""
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(atoms.demands))
    takers = atoms.demands.sum(axis=2)
    beyond = entering @ np.maximum(takers - 1, 0)
    return float(beyond.max() / (topology.slots * topology.nvlink_bytes_per_s))
