"""Making a plan, step by step.

Flows in: family, config, layouts, topology, options. Flows out: a checked `Plan`. Invariant: the plan depends on the
inputs alone, so that every rank that makes it has the same; the parcels do not depend on which replicas live, so that
a sync that lost an engine goes on with the parcels already delivered.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames
from slimerl.resharding.planner.atoms import spell_out
from slimerl.resharding.planner.cover import check_cover
from slimerl.resharding.planner.entries import choose_entries, slot_speeds
from slimerl.resharding.planner.parcels import (
    Fragments,
    Parcels,
    choose_size,
    even_out,
    group_keys,
    make_routes,
    pack,
    split_over_owners,
)
from slimerl.resharding.planner.plan import Plan, Template, spell_operations
from slimerl.resharding.planner.ranks import rank_table
from slimerl.resharding.planner.records import refine
from slimerl.resharding.planner.rings import schedule, turns_of
from slimerl.resharding.planner.templates import IntArray, Signatures, signatures
from slimerl.resharding.planner.topology import Topology, engine_nodes
from slimerl.resharding.planner.waterfill import Level, level
from slimerl.resharding.planner.wire import WireFormat

REVISION = 1
"""Part of every key: raise it when equal inputs give another plan."""


@dataclass(frozen=True)
class PlanOptions:
    """How finely a plan cuts."""

    operations_per_nic: int = 760
    """Sent and received together; the parcels are made as large as this asks."""
    least_parcel_bytes: int = 1 << 20
    """Below this an operation costs more than its bytes; smaller tensors are packed."""
    most_parcel_bytes: int = 1 << 28
    """Bounds the buffers of a rank: two parcels each way."""
    granule_rows: int = 128
    """A tensor is split at multiples of this many rows: a block of FP8."""
    class_copies_below: float = 0.6
    """The trainer sends a copy to each class of nodes while that keeps its NICs below this part of the engines' time."""


@dataclass(frozen=True)
class SyncShape:
    """All that a plan depends on."""

    config: Mapping[str, Any]
    """config.json"""
    train: MegatronLayout
    engine: EngineLayout
    topology: Topology
    wire: WireFormat
    options: PlanOptions = PlanOptions()

    @property
    def key(self) -> str:
        """Digest of everything, living replicas and NIC speeds included."""
        parts = (REVISION, sorted(self.config.items()), self.train, self.engine, self.topology, self.wire, self.options)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def model_signatures(shape: SyncShape) -> Signatures:
    """The templates of the family that the config names."""
    table = family_of(shape.config).table(shape.config)
    te_names = shape.train.names is ModuleNames.TRANSFORMER_ENGINE
    return signatures(table, shape.train, shape.engine, shape.wire, te_names)


def make_template(shape: SyncShape) -> Template:
    """Atoms, owners and shares: everything before nodes and rounds.

    Raises:
        ConfigError, LayoutError: the model cannot be cut like that.
        CoverageError: something is not held, or not taken.
    """
    model, topology, options = model_signatures(shape), shape.topology, shape.options
    sides = []
    for layout, parameters in ((shape.train, model.train_parameters), (shape.engine, model.engine_parameters)):
        counts = {parameter.experts for parameter in parameters if parameter.experts}
        sides.append(rank_table(layout, model.units, {parameter.axis for parameter in parameters}, counts))
    train, engine = sides
    records = refine(model)
    atoms = spell_out(model, records, train, engine, topology, options.granule_rows)
    speeds = topology.nic_speeds()
    nodes = engine_nodes(topology)
    classes = atoms.demands.any(axis=2)
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(classes))
    ingress_s = float((entering @ classes / slot_speeds(nodes, speeds).sum(axis=1)).max())
    weight = classes.sum(axis=1)[atoms.demand]
    levels: list[Level] = []
    for copies in (weight, np.ones_like(weight)):
        nbytes = np.bincount(atoms.owner, weights=atoms.nbytes * copies, minlength=len(atoms.owners))
        levels.append(level(atoms.owners, nbytes, speeds[: train.ranks]))
        if (weight == 1).all() or levels[0].seconds.max() <= options.class_copies_below * ingress_s:
            break
    relay_classes = len(levels) > 1
    if relay_classes:
        weight = np.ones_like(weight)
    least = _least_stripe(options, float(levels[-1].seconds.max() * speeds.max()))
    fragments = split_over_owners(atoms, train.window_of, weight, levels[-1].shares, least)
    return Template(model, train, engine, records, atoms, levels[-1], relay_classes, fragments)


def _least_stripe(options: PlanOptions, level_bytes: float) -> int:
    """A small model is cut more finely, or no NIC could be level with the others."""
    return int(min(options.least_parcel_bytes, max(4096, level_bytes / 2000)))


def make_plan(shape: SyncShape, template: Template | None = None) -> Plan:
    """The whole plan, checked. `template`: of the same shape but for the living replicas, to save making it again.

    Raises as `make_template`, and CoverageError where the plan itself is wrong.
    """
    template = make_template(shape) if template is None else template
    nodes = engine_nodes(shape.topology)
    speeds = slot_speeds(nodes, shape.topology.nic_speeds())
    fragments, parcels = _parcels(shape, template, nodes.members)
    slot = choose_entries(parcels, speeds)
    if nodes.members > 1:
        fragments, parcels, slot = _level_rings(shape, template, fragments, parcels, slot, nodes.members)
    turns = schedule(parcels, slot, nodes.members, template.relay_classes)
    operations = spell_operations(parcels, turns, nodes, slot)
    plan = Plan(template, shape.topology, nodes, fragments, parcels, slot, turns, operations, shape.key)
    check_cover(plan)
    return plan


def _parcels(shape: SyncShape, template: Template, members: int) -> tuple[Fragments, Parcels]:
    options, atoms = shape.options, template.atoms
    per_nic = options.operations_per_nic / (2 - 1 / members)
    level_bytes = float(atoms.nbytes.sum()) / shape.topology.engine_ranks
    least = _least_stripe(options, level_bytes)
    for by_node in (False, True):
        route, routes = make_routes(atoms, by_node)
        keys = group_keys(template.fragments, atoms, template.train.window_of, route)
        size, fits = choose_size(
            template.fragments, atoms, keys, routes, per_nic, least, options.most_parcel_bytes
        )
        if fits:
            break
    return pack(template.fragments, atoms, keys, routes, size, least)


def _level_rings(
    shape: SyncShape, template: Template, fragments: Fragments, parcels: Parcels, slot: IntArray, members: int
) -> tuple[Fragments, Parcels, IntArray]:
    """Fill the last turn of each ring; the halves of a split parcel enter where it did."""
    parcel, _, ring = turns_of(parcels, slot)
    single = np.bincount(parcel, minlength=len(parcels)) == 1
    rings = np.full(len(parcels), -1, dtype=np.int64)
    rings[parcel] = ring
    rings[~single] = -1
    least = _least_stripe(shape.options, float(parcels.nbytes.max()) * 10)
    begins = parcels.first_fragment[:-1]
    old = (fragments.atom[begins], fragments.first[begins])
    split, levelled = even_out(fragments, template.atoms, parcels, rings, members, least)
    # Fragments keep their order, so a new parcel lies in the old one that begins at or before it.
    key = np.zeros(len(levelled), dtype=np.int64)
    starts = {(int(atom), int(row)): number for number, (atom, row) in enumerate(zip(*old, strict=True))}
    current = 0
    for number, begin in enumerate(levelled.first_fragment[:-1].tolist()):
        current = starts.get((int(split.atom[begin]), int(split.first[begin])), current)
        key[number] = current
    return split, levelled, slot[key]
