"""Making a plan, step by step.

Flows in: family, config, layouts, topology, options. Flows out: a checked `Plan`. Invariant: the plan depends on the
inputs alone, so that every rank that makes it has the same; the parcels do not depend on which replicas live, so that
a sync that lost an engine goes on with the parcels already delivered.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slimerl.resharding.families import family_of
from slimerl.resharding.families.family import PLAIN, Form
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames
from slimerl.resharding.planner.atoms import spell_out
from slimerl.resharding.planner.cover import check_cover
from slimerl.resharding.planner.entries import choose_entries, slot_speeds
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
from slimerl.resharding.planner.plan import Plan, Template, spell_operations
from slimerl.resharding.planner.ranks import rank_table, some
from slimerl.resharding.planner.records import refine
from slimerl.resharding.planner.rings import finer_at_the_end, schedule
from slimerl.resharding.planner.templates import Signatures, signatures
from slimerl.resharding.planner.topology import Topology, engine_nodes
from slimerl.resharding.planner.waterfill import Level, level

REVISION = 1
"""Part of every key: raise it when equal inputs give another plan."""


@dataclass(frozen=True)
class PlanOptions:
    """How finely a plan cuts."""

    operations_per_nic: int = 720
    """Sent and received together; the parcels are made as large as this asks."""
    least_parcel_bytes: int = 1 << 20
    """Below this an operation costs more than its bytes; smaller tensors are packed."""
    most_parcel_bytes: int = 1 << 28
    """Bounds the buffers of a rank: two parcels each way."""
    granule_rows: int = 128
    """A tensor is split at multiples of this many rows: a block of FP8."""
    class_copies_below: float = 0.6
    """The trainer sends a copy to each class of nodes while its NICs are busy for less than this part of the time."""
    ring_copies_below: float = 0.3
    """And one copy to each of several shorter rings below this: they fill and empty faster."""
    shortest_ring: int = 4
    windows: int = 1
    """Groups of layers that arrive one after another: with more, less staging memory, but smaller parcels."""
    last_turn_pieces: int = 4
    """Parcels of the last turn are cut into this many."""


@dataclass(frozen=True)
class SyncShape:
    """All that a plan depends on."""

    config: Mapping[str, Any]
    """config.json"""
    train: MegatronLayout
    engine: EngineLayout
    topology: Topology
    dtype: torch.dtype = torch.bfloat16
    """Of weights that are not quantised and have no dtype of their own."""
    form: Form = PLAIN
    """As the engine holds the model: with FP8 scales, with the multi-token-prediction layer."""
    options: PlanOptions = PlanOptions()

    @property
    def key(self) -> str:
        """Digest of everything, living replicas and NIC speeds included."""
        parts = (
            REVISION,
            sorted(self.config.items()),
            self.train,
            self.engine,
            self.topology,
            self.dtype,
            self.form,
            self.options,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def model_signatures(shape: SyncShape) -> Signatures:
    """The templates of the family that the config names."""
    table = shape.form.of(family_of(shape.config).table(shape.config))
    te_names = shape.train.names == ModuleNames.TRANSFORMER_ENGINE
    return signatures(table, shape.train, shape.engine, shape.dtype, shape.form.scales, te_names)


def make_template(shape: SyncShape) -> Template:
    """Atoms, owners and shares: everything before nodes and rounds.

    Raises:
        ConfigError, LayoutError: the model cannot be cut like that.
        CoverageError: something is not held, or not taken.
    """
    model, topology, options = model_signatures(shape), shape.topology, shape.options
    train = rank_table(shape.train, model.layers, model.prediction, model.train_parameters)
    engine = rank_table(shape.engine, model.layers, model.prediction, model.engine_parameters)
    records = refine(model)
    atoms = spell_out(model, records, train, engine, topology, options.granule_rows)
    speeds = topology.nic_speeds()
    nodes = engine_nodes(topology)
    classes = some(atoms.demands, 2)
    entering = np.bincount(atoms.demand, weights=atoms.nbytes, minlength=len(classes))
    ingress_s = float((entering @ classes / slot_speeds(nodes, speeds).sum(axis=1)).max())
    weight = classes.sum(axis=1)[atoms.demand]
    levels: list[Level] = []
    for copies in (weight, np.ones_like(weight)):
        nbytes = np.bincount(atoms.owner, weights=atoms.nbytes * copies, minlength=len(atoms.owners)).astype(float)
        levels.append(level(atoms.owners, nbytes, speeds[: train.ranks]))
        if (weight == 1).all() or levels[0].seconds.max() <= options.class_copies_below * ingress_s:
            break
    relay_classes = len(levels) > 1
    if relay_classes:
        weight = np.ones_like(weight)
    least = _least_stripe(options, float(levels[-1].seconds.max() * speeds.max()))
    fragments = split_over_owners(atoms, train.place_in_stage, weight, levels[-1].shares, least)
    copies = int(options.ring_copies_below * ingress_s / levels[-1].seconds.max())
    rings = max(1, min(copies, nodes.members // options.shortest_ring))
    return Template(model, train, engine, records, atoms, levels[-1], relay_classes, rings, fragments)


def _least_stripe(options: PlanOptions, level_bytes: float) -> int:
    """A small model is cut more finely, or no NIC could be level with the others."""
    return int(min(options.least_parcel_bytes, max(4096, level_bytes / 2000)))


def make_plan(shape: SyncShape, template: Template | None = None) -> Plan:
    """The whole plan, checked. `template`: of the same shape but for the living replicas, to save making it again.

    Raises as `make_template`, and CoverageError where the plan itself is wrong.
    """
    template = make_template(shape) if template is None else template
    nodes = engine_nodes(shape.topology, template.rings)
    longest = max(len(ring) for ring in nodes.rings)
    fragments, parcels = _parcels(shape, template, longest)
    slot = choose_entries(parcels, slot_speeds(nodes, shape.topology.nic_speeds()))
    if longest > 1:
        least = _least_stripe(shape.options, float(parcels.nbytes.max()) * 10)
        counts = finer_at_the_end(parcels, slot, longest, shape.options.last_turn_pieces, least)
        fragments, parcels, part_of = split_parcels(fragments, template.atoms, parcels, counts, least)
        slot = slot[part_of]
    turns = schedule(parcels, slot, nodes.rings, template.relay_classes)
    operations = spell_operations(parcels, turns, nodes)
    plan = Plan(template, shape.topology, nodes, fragments, parcels, slot, turns, operations, shape.key)
    check_cover(plan)
    return plan


def _parcels(shape: SyncShape, template: Template, members: int) -> tuple[Fragments, Parcels]:
    options, atoms = shape.options, template.atoms
    # A node passes on all that it gets but for what ends with it; the last turn is cut up, and turns are filled up.
    per_nic = options.operations_per_nic / (2 - 1 / members)
    per_nic = max(per_nic // members * members - (options.last_turn_pieces - 1) * members, per_nic / 2)
    level_bytes = float(atoms.nbytes.sum()) / shape.topology.engine_ranks
    least = _least_stripe(options, level_bytes)
    for by_node in (False, True):
        route, routes = make_routes(atoms, by_node)
        keys = group_keys(template.fragments, atoms, template.train.windows(options.windows), route)
        size, fits = choose_size(template.fragments, atoms, keys, routes, per_nic, least, options.most_parcel_bytes)
        if fits:
            break
    return pack(template.fragments, atoms, keys, routes, size, least)
