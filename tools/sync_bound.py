"""The least possible time of a sync by linear programming, from the families' placements alone.

Flows in: a `SyncShape`. Flows out: seconds. The planner's own bound comes from its templates and a water level; this
one enumerates every rank's placements, groups boxes by who holds them, and lets scipy's HiGHS find the best split:
bytes x[box group, owner] that leave each trainer NIC once, bytes y[node, NIC] that enter each node once. It shares with
the planner the families' tables and nothing else.
"""

from collections import defaultdict

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from slimerl.resharding.boxes import Box
from slimerl.resharding.families import family_of
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.planner import SyncShape, Topology

GIB = 2.0**30
"""HiGHS wants numbers near 1."""


def linear_bound(shape: SyncShape) -> float:
    """Seconds. Raises RuntimeError where the solver finds no optimum."""
    topology = shape.topology
    owned = _owned_bytes(shape)
    entering = _bytes_of_nodes(shape)
    # Variables: x for each (group, owner), y for each (node of a replica, NIC), and the time t.
    pairs = [(group, rank) for group, owners in enumerate(owned) for rank in sorted(owners)]
    slots = _nics_of_emptiest_node(topology)
    count = len(pairs) + len(entering) * slots
    group, rank = (np.array(column) for column in zip(*pairs, strict=True))
    speed = topology.nic_bytes_per_s / GIB
    node = np.repeat(np.arange(len(entering)), slots)
    equal = coo_array(
        (np.ones(count), (np.r_[group, len(owned) + node], np.arange(count))),
        shape=(len(owned) + len(entering), count + 1),
    )
    nics = topology.trainer_ranks + len(entering) * slots
    used = np.r_[rank, topology.trainer_ranks + np.arange(len(entering) * slots)]
    limit = coo_array(
        (
            np.r_[np.ones(count), np.full(nics, -speed)],
            (np.r_[used, np.arange(nics)], np.r_[np.arange(count), np.full(nics, count)]),
        ),
        shape=(nics, count + 1),
    )
    totals = np.array([*owned.values(), *entering]) / GIB
    found = linprog(np.r_[np.zeros(count), 1.0], limit, np.zeros(nics), equal, totals, method="highs")
    if not found.success:
        raise RuntimeError(f"no bound: {found.message}")
    return float(found.x[-1])


def _nics_of_emptiest_node(topology: Topology) -> int:
    """Of those that an engine is on: what enters each of several nodes enters that one, too."""
    living = [int(replica not in topology.dead) for replica in range(topology.replicas)]
    starts = range(0, topology.replicas, topology.copies_per_node)
    engines = [sum(living[start : start + topology.copies_per_node]) for start in starts]
    return min(filter(None, engines)) * topology.slots // topology.copies_per_node


def _owned_bytes(shape: SyncShape) -> dict[frozenset[int], int]:
    """Bytes of one copy of the model by the set of trainer ranks that hold them."""
    family = family_of(shape.config)
    wire = {t.name: t for t in family.logical_tensors(shape.config, shape.dtype, shape.form)}
    holders: dict[tuple[str, Box], set[int]] = defaultdict(set)
    for rank in range(shape.train.world_size):
        for placement in family.megatron_placements(shape.config, shape.train, rank, shape.form):
            if not placement.is_padding:
                holders[placement.tensor, placement.box].add(rank)
    owned: dict[frozenset[int], int] = defaultdict(int)
    for (name, box), ranks in holders.items():
        nbytes = box.numel * wire[name].dtype.itemsize
        owned[frozenset(ranks)] += nbytes + _scale_bytes(shape, scale_name(name) in wire, box)
    total = sum(tensor.nbytes for tensor in wire.values())
    if sum(owned.values()) != total:
        raise RuntimeError(f"the trainer's boxes have {sum(owned.values())} bytes, the model {total}")
    return owned


def _scale_bytes(shape: SyncShape, scaled: bool, box: Box) -> int:
    if not scaled or shape.form.scales is None:
        return 0
    blocks = shape.form.scales.blocks
    rows, columns = (blocks(stop) - blocks(start) for start, stop in zip(box.starts, box.stops, strict=True))
    return rows * columns * 4


def _bytes_of_nodes(shape: SyncShape) -> list[int]:
    """For each node of a replica (or for the node that several replicas share), bytes of one copy of its shards."""
    family, topology = family_of(shape.config), shape.topology
    sizes = {t.name: t.dtype.itemsize for t in family.logical_tensors(shape.config, shape.dtype, shape.form)}
    nodes: list[dict[tuple[str, Box], int]] = [{} for _ in range(topology.classes)]
    for rank in range(topology.engine_ranks):
        node, _ = topology.class_and_slot(rank)
        for placement in family.engine_placements(shape.config, shape.engine, rank, shape.form):
            if not placement.is_padding:
                nodes[node][placement.tensor, placement.box] = placement.box.numel * sizes[placement.tensor]
    return [sum(node.values()) for node in nodes]
