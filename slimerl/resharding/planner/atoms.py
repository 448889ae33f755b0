"""Atoms: every record, in every unit and for every run of experts, with who owns it and who wants it.

Flows in: records and the ranks of both sides. Flows out: `Atoms`, as arrays. Invariant: all ranks of an atom's owner
set hold all of it; the GPUs of its demand set are exactly those that take it, once each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.layouts import ExpertLocation
from slimerl.resharding.planner.ranks import BoolArray, ExpertKey, RankTable
from slimerl.resharding.planner.records import Records
from slimerl.resharding.planner.templates import IntArray, Signatures
from slimerl.resharding.planner.topology import Topology


@dataclass(frozen=True)
class Atoms:
    """One entry an atom. Its rows are those of its record, expert after expert."""

    record: IntArray
    unit: IntArray
    expert: IntArray
    """The first of the run."""
    experts: IntArray
    rows: IntArray
    """Of all experts of the run."""
    row_bytes: IntArray
    granule: IntArray
    """An atom is split at multiples of this many rows."""
    owner: IntArray
    demand: IntArray
    owners: BoolArray
    """[owner sets, trainer ranks]"""
    demands: BoolArray
    """[demand sets, classes of nodes, slots]"""
    places: IntArray
    """As `demands`: in how many places the GPU stores it (an expert may be there more than once)."""

    @property
    def nbytes(self) -> IntArray:
        return self.rows * self.row_bytes


def spell_out(
    model: Signatures, records: Records, train: RankTable, engine: RankTable, topology: Topology, granule_rows: int
) -> Atoms:
    """The atoms of a model.

    Raises:
        CoverageError: an atom that no trainer rank owns, or that no engine rank wants.
    """
    record, unit, run, span = _expand(model, records, train, engine)
    template = records.template[record]
    kinds = sorted({(t.experts, t.location) for t in model.templates}, key=lambda kind: (kind[0], kind[1].value))
    kind = np.array([kinds.index((t.experts, t.location)) for t in model.templates])[template]
    keys = _Keys(record, unit, run, kind)
    owner, owning = _owner_sets(model, records, train, keys, [(count, ExpertLocation.FIXED) for count, _ in kinds])
    demand, wanting = _demand_sets(model, records, engine, keys, kinds)
    for number, sets, what in ((owner, owning, "no trainer rank owns"), (demand, wanting, "no engine rank wants")):
        empty = np.flatnonzero(~sets.any(axis=1))
        if len(empty):
            lost = np.flatnonzero(number == empty[0])[0]
            raise CoverageError(
                f"{model.templates[template[lost]].name}, unit {unit[lost]} of the model, expert {run[lost]}: {what} it"
            )
    places = _on_nodes(wanting, topology)
    rows = records.rows[record]
    return Atoms(
        record, unit, run, span, rows * span, records.row_bytes[record], np.gcd(granule_rows, rows), owner, demand,
        owning > 0, places > 0, places,
    )  # fmt: skip


def _expand(
    model: Signatures, records: Records, train: RankTable, engine: RankTable
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Record, unit, first expert and number of experts of each atom."""
    parts = []
    bounds = np.searchsorted(records.template, np.arange(len(model.templates) + 1))
    for template, start, stop in zip(model.templates, bounds[:-1], bounds[1:], strict=True):
        cuts = np.array([0, 1])
        if template.experts:
            cuts = np.union1d(
                train.expert_cuts((template.experts, ExpertLocation.FIXED)),
                engine.expert_cuts((template.experts, template.location)),
            )
        shape = len(template.units), len(cuts) - 1, stop - start
        grids = np.broadcast_arrays(
            np.arange(start, stop)[None, None, :],
            np.array(template.units)[:, None, None],
            cuts[:-1][None, :, None],
            np.diff(cuts)[None, :, None],
        )
        parts.append(np.stack([grid.reshape(-1) for grid in grids]) if np.prod(shape) else np.empty((4, 0), np.int64))
    record, unit, expert, experts = np.concatenate(parts, axis=1)
    return record, unit, expert, experts


class _Keys(NamedTuple):
    """What decides who has an atom; `kind` numbers the kinds of experts."""

    record: IntArray
    unit: IntArray
    expert: IntArray
    kind: IntArray


def _distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """For each row of the columns the number of its value among the distinct ones, and where each first stands."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, index, inverse = np.unique(code, return_index=True, return_inverse=True)
    return inverse, index


def _merge(sets: IntArray, number: IntArray) -> tuple[IntArray, IntArray]:
    """Give equal rows of `sets` one number."""
    alike: dict[bytes, int] = {}
    small = sets.astype(np.uint8)
    new = np.array([alike.setdefault(row.tobytes(), len(alike)) for row in small])
    _, index = np.unique(new, return_index=True)
    return new[number], sets[index]


def _held(table: RankTable, keys: _Keys, kinds: Sequence[ExpertKey]) -> IntArray:
    """[keys, ranks]: in how many places the rank has the unit and, where there are experts, the expert."""
    held = table.holds[keys.unit][:, table.stage_of].astype(np.int64)
    for number, key in enumerate(kinds):
        concerned = np.flatnonzero(keys.kind == number)
        if key[0] and len(concerned):
            layer = table.layer_of(keys.unit[concerned], key)
            held[concerned] *= table.copies[key][layer, keys.expert[concerned]]
    return held


def _variant(table: RankTable, keys: _Keys, kinds: Sequence[ExpertKey]) -> IntArray:
    """Equal for units of a key that the same ranks hold, each with the same experts."""
    pattern = np.unique(table.holds, axis=0, return_inverse=True)[1].reshape(-1)[keys.unit]
    layered = [bool(key[0]) and len(table.places[key]) > 1 for key in kinds]
    return np.where(np.array(layered)[keys.kind], len(pattern) + keys.unit, pattern)


def _owner_sets(
    model: Signatures, records: Records, table: RankTable, keys: _Keys, kinds: Sequence[ExpertKey]
) -> tuple[IntArray, IntArray]:
    axes = sorted({parameter.axis for parameter in model.train_parameters}, key=lambda axis: axis.value)
    axis_of = np.array([axes.index(parameter.axis) for parameter in model.train_parameters])
    axis, part = axis_of[records.source[keys.record]], records.part[keys.record]
    number, index = _distinct(axis, part, _variant(table, keys, kinds), keys.expert, keys.kind)
    sets = _held(table, _Keys(*(column[index] for column in keys)), kinds)
    sets *= np.stack([table.parts[a] for a in axes])[axis[index]] == part[index, None]
    return _merge(sets, number)


def _demand_sets(
    model: Signatures, records: Records, table: RankTable, keys: _Keys, kinds: Sequence[ExpertKey]
) -> tuple[IntArray, IntArray]:
    takes = np.zeros((len(records), table.ranks), dtype=np.int64)
    parts = np.stack([table.parts[parameter.axis] for parameter in model.engine_parameters])
    of = np.repeat(np.arange(len(records)), np.diff(records.first_destination))
    np.add.at(takes, of, parts[records.destination] == records.destination_part[:, None])
    taking, takers = _merge(takes, np.arange(len(records)))
    taking = taking[keys.record]
    number, index = _distinct(taking, _variant(table, keys, kinds), keys.expert, keys.kind)
    return _merge(_held(table, _Keys(*(column[index] for column in keys)), kinds) * takers[taking[index]], number)


def _on_nodes(wanting: IntArray, topology: Topology) -> IntArray:
    """Demand sets of ranks as those of each class of nodes; every replica of a shared node wants the same."""
    demands = np.zeros((len(wanting), topology.classes, topology.slots), dtype=np.int64)
    for rank in range(topology.engine_ranks):
        for copy in range(topology.copies_per_node):
            node, slot = topology.class_and_slot(rank, copy)
            demands[:, node, slot] = wanting[:, rank]
    return demands
