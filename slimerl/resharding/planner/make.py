"""Making a plan, step by step.

Flows in: a `SyncShape`. Flows out: a checked `Plan`. Invariant: the plan depends on the shape alone; without an engine
(`without`) it keeps its parcels, so that a sync goes on from what the other engines already have.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import ModuleNames
from slimerl.resharding.planner.atoms import Atoms, spell_out
from slimerl.resharding.planner.bounds import Bounds, fan_out_bound, ingress_bound
from slimerl.resharding.planner.cover import check_cover
from slimerl.resharding.planner.entries import choose_entries
from slimerl.resharding.planner.parcels import (
    Fragments,
    Parcels,
    choose_size,
    group_keys,
    make_routes,
    pack,
    split_over_owners,
    split_parcels,
)
from slimerl.resharding.planner.plan import Plan, PlanTemplate, spell_operations
from slimerl.resharding.planner.ranks import rank_table, some
from slimerl.resharding.planner.records import refine
from slimerl.resharding.planner.rings import finer_at_the_end, schedule
from slimerl.resharding.planner.shape import PlanOptions, SyncShape
from slimerl.resharding.planner.templates import IntArray, Signatures, signatures
from slimerl.resharding.planner.topology import Nodes, engine_nodes
from slimerl.resharding.planner.waterfill import FloatArray, Level, level


def model_signatures(shape: SyncShape) -> Signatures:
    """The templates of the family that the config names."""
    table = shape.form.of(family_of(shape.config).table(shape.config))
    table.check_engine(shape.engine)
    te_names = shape.train.names == ModuleNames.TRANSFORMER_ENGINE
    return signatures(table, shape.train, shape.engine, shape.dtype, shape.form.scales, te_names)


def make_template(shape: SyncShape) -> PlanTemplate:
    """Atoms, owners and shares: everything before nodes and rounds.

    Raises:
        ConfigError, LayoutError: the model cannot be cut like that, or there are too many GPUs (`MOST_GPUS`).
        CoverageError: something is not held, or not taken.
    """
    shape.topology.check_scale()
    model, topology, options = model_signatures(shape), shape.topology, shape.options
    train = rank_table(shape.train, model.layers, model.prediction, model.train_parameters)
    engine = rank_table(shape.engine, model.layers, model.prediction, model.engine_parameters)
    records = refine(model)
    atoms = spell_out(model, records, train, engine, topology, options.granule_rows)
    speeds = topology.nic_speeds()
    nodes = engine_nodes(topology)
    ingress = ingress_bound(atoms, nodes, speeds)
    bounds = Bounds(0.0, ingress, fan_out_bound(atoms, nodes, topology.nvlink_bytes_per_s))
    classes = some(atoms.demands, 2).sum(axis=1)[atoms.demand]
    levelled, weight = _level(atoms, np.ones_like(classes), speeds[: train.ranks])
    bounds = replace(bounds, egress_s=levelled.bound_s)
    relay_classes = False
    if (classes > 1).any():
        copied, _ = _level(atoms, classes, speeds[: train.ranks])
        relay_classes = bool(copied.seconds.max() > options.class_copies_below * bounds.ingress_s)
        if not relay_classes:
            levelled, weight = copied, classes
    slowest = float(levelled.seconds.max())
    least = _least_stripe(options, slowest * float(speeds.max()))
    fragments = split_over_owners(atoms, train.place_in_stage, weight, levelled.shares, least)
    copies = int(options.ring_copies_below * bounds.ingress_s / slowest)
    rings = max(1, min(copies, nodes.members // options.shortest_ring))
    return PlanTemplate(model, train, engine, records, atoms, bounds, relay_classes, rings, fragments)


def _level(atoms: Atoms, copies: IntArray, speeds: FloatArray) -> tuple[Level, IntArray]:
    nbytes = np.bincount(atoms.owner, weights=atoms.nbytes * copies, minlength=len(atoms.owners))
    return level(atoms.owners, nbytes.astype(np.float64), speeds), copies


def _least_stripe(options: PlanOptions, level_bytes: float) -> int:
    """A small model is cut more finely, or no NIC could be level with the others."""
    return int(min(options.least_parcel_bytes, max(4096, level_bytes / 2000)))


AIM = 0.9
"""Sizes are chosen for this part of the operations allowed: parcels do not come out even."""
ATTEMPTS = 3


def make_plan(shape: SyncShape, template: PlanTemplate | None = None) -> Plan:
    """The whole plan, checked. `template`: that of this shape, where it has been made already.

    Raises as `make_template`, and CoverageError where the plan itself is wrong.
    """
    template = make_template(shape) if template is None else template
    nodes = engine_nodes(shape.topology, template.rings)
    aim = shape.options.operations_per_nic * AIM
    for _ in range(ATTEMPTS):
        plan = _plan(shape, template, nodes, aim)
        sent, received = plan.nic_operations
        most = int((sent + received)[template.train.ranks :].max())
        if most <= shape.options.operations_per_nic:
            break
        aim *= 0.97 * shape.options.operations_per_nic / most
    check_cover(plan)
    return plan


def _plan(shape: SyncShape, template: PlanTemplate, nodes: Nodes, aim: float) -> Plan:
    longest = max(len(ring) for ring in nodes.rings)
    fragments, parcels = _parcels(shape, template, longest, aim)
    slot = choose_entries(parcels, nodes, shape.topology.nic_speeds())
    if longest > 1:
        least = _least_stripe(shape.options, float(parcels.nbytes.max()) * 10)
        counts = finer_at_the_end(parcels, slot, longest, shape.options.last_turn_pieces, least)
        fragments, parcels, part_of = split_parcels(fragments, template.atoms, parcels, counts, least)
        slot = slot[part_of]
    turns = schedule(parcels, slot, nodes.rings, template.relay_classes)
    operations = spell_operations(parcels, turns, nodes)
    return Plan(shape, template, nodes, fragments, parcels, slot, turns, operations)


def _parcels(shape: SyncShape, template: PlanTemplate, longest: int, aim: float) -> tuple[Fragments, Parcels]:
    """Parcels for about `aim` operations of an engine's NIC, in rings of up to `longest` nodes."""
    options, atoms = shape.options, template.atoms
    # A node passes on all that it gets but for what ends with it; the last turn is cut up, and turns are filled up.
    passed_to = longest * (shape.topology.classes if template.relay_classes else 1)
    per_nic = aim / (2 - 1 / passed_to)
    per_nic = max(per_nic // longest * longest - (options.last_turn_pieces - 1) * longest, per_nic / 2)
    level_bytes = float(atoms.nbytes.sum()) / shape.topology.engine_ranks
    least = _least_stripe(options, level_bytes)
    for by_node in (False, True):
        route, routes = make_routes(atoms, by_node)
        keys = group_keys(template.fragments, atoms, template.train.windows(options.windows), route)
        size, fits = choose_size(template.fragments, atoms, keys, routes, per_nic, least, options.most_parcel_bytes)
        if fits:
            break
    return pack(template.fragments, atoms, keys, routes, size, least)


def without(plan: Plan, dead: Iterable[int]) -> Plan:
    """The plan of the same parcels for the other engines: rings are closed without the replicas `dead`.

    Raises LayoutError where no engine is left.
    """
    gone = plan.shape.topology.dead | frozenset(dead)
    shape = replace(plan.shape, topology=replace(plan.shape.topology, dead=gone))
    nodes = engine_nodes(shape.topology, plan.template.rings)
    turns = schedule(plan.parcels, plan.slot, nodes.rings, plan.template.relay_classes)
    operations = spell_operations(plan.parcels, turns, nodes)
    spliced = replace(plan, shape=shape, nodes=nodes, turns=turns, operations=operations)
    check_cover(spliced)
    return spliced
