"""Entry: by which NIC of a node a parcel comes in. What several GPUs want enters once and fans out over NVLink.

Flows in: parcels with the GPUs that want them, NIC speeds. Flows out: one slot a parcel. Invariant: a parcel enters
all its nodes at the same slot (NIC n talks to NIC n: one rail), and no slot of a node is much fuller than the others.
"""

from dataclasses import replace

import numpy as np

from slimerl.resharding.planner.parcels import Parcels
from slimerl.resharding.planner.ranks import BoolArray, some
from slimerl.resharding.planner.templates import IntArray
from slimerl.resharding.planner.topology import Nodes
from slimerl.resharding.planner.waterfill import FloatArray

UNEVEN = 0.003
"""A slot may exceed the mean of its node by this part before a parcel enters by a GPU that does not want it."""


def slot_speeds(nodes: Nodes, speeds: FloatArray) -> FloatArray:
    """[classes, slots]: the slowest NIC of all nodes of a class, since a parcel passes each of them."""
    return speeds[nodes.entry].min(axis=0)


def choose_entries(parcels: Parcels, nodes: Nodes, nic_speeds: FloatArray) -> IntArray:
    """The slot of each parcel, one that every node has where there is such: the NIC in the place of an absent one
    would take in both shares, and be the fullest of all. `nic_speeds`: [NICs]."""
    speeds = slot_speeds(nodes, nic_speeds)
    everywhere = np.flatnonzero((nodes.nic >= 0).all(axis=(0, 1)))
    if not len(everywhere):
        return _entries(parcels, speeds)
    return everywhere[_entries(replace(parcels, routes=parcels.routes[:, :, everywhere]), speeds[:, everywhere])]


def _entries(parcels: Parcels, speeds: FloatArray) -> IntArray:
    """`speeds`: [classes, slots]."""
    classes = parcels.nodes_of_route
    # A GPU serves a route well where it wants the parcel in every class of nodes that takes it.
    wanted = ~some(~parcels.routes & classes[:, :, None], 1)
    wanted[~some(wanted, 1)] = True
    only = np.where(wanted.sum(axis=1) == 1, wanted.argmax(axis=1), -1)
    slot = only[parcels.route]
    seconds = np.zeros(speeds.shape)
    for node in range(len(speeds)):
        fixed = (slot >= 0) & classes[parcels.route, node]
        seconds[node] = np.bincount(slot[fixed], weights=parcels.nbytes[fixed], minlength=speeds.shape[1])
    seconds /= speeds
    _place(parcels, classes, wanted, slot, seconds, speeds)
    _move(parcels, classes, slot, seconds, speeds)
    return slot


def _place(
    parcels: Parcels, classes: BoolArray, wanted: BoolArray, slot: IntArray, seconds: FloatArray, speeds: FloatArray
) -> None:
    """Largest first, give every open parcel the emptiest slot among the GPUs that want it."""
    open_ = np.flatnonzero(slot < 0)
    open_ = open_[np.argsort(-parcels.nbytes[open_], kind="stable")]
    cost = (1.0 / speeds).tolist()
    load = seconds.tolist()
    nodes_of = [np.flatnonzero(row).tolist() for row in classes]
    slots_of = [np.flatnonzero(row).tolist() for row in wanted]
    for parcel, route, nbytes in zip(
        open_.tolist(), parcels.route[open_].tolist(), parcels.nbytes[open_].tolist(), strict=True
    ):
        nodes = nodes_of[route]
        best = min(slots_of[route], key=lambda s: max(load[n][s] + nbytes * cost[n][s] for n in nodes))
        slot[parcel] = best
        for node in nodes:
            load[node][best] += nbytes * cost[node][best]
    seconds[:] = load


def _move(parcels: Parcels, classes: BoolArray, slot: IntArray, seconds: FloatArray, speeds: FloatArray) -> None:
    """While a slot is too full, send its next parcel in by the emptiest slot of the node."""
    for node in range(len(speeds)):
        alone = classes[:, node] & (classes.sum(axis=1) == 1)
        while True:
            full, empty = int(seconds[node].argmax()), int(seconds[node].argmin())
            mean = (seconds[node] * speeds[node]).sum() / speeds[node].sum()
            excess = (seconds[node, full] - mean) * speeds[node, full]
            if seconds[node, full] <= mean * (1 + UNEVEN):
                break
            room = (mean - seconds[node, empty]) * speeds[node, empty]
            movable = np.flatnonzero(
                (slot == full) & alone[parcels.route] & (parcels.nbytes <= min(excess, room) * 1.5)
            )
            if not len(movable):
                break
            parcel = movable[parcels.nbytes[movable].argmax()]
            slot[parcel] = empty
            seconds[node, full] -= parcels.nbytes[parcel] / speeds[node, full]
            seconds[node, empty] += parcels.nbytes[parcel] / speeds[node, empty]
