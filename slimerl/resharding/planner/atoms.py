"""Atoms: every record, in every unit and for every run of experts, with who owns it and who wants it.

Flows in: records and the ranks of both sides. Flows out: `Atoms`, as arrays. Invariant: all ranks of an atom's owner
set hold all of it; the GPUs of its demand set are exactly those that take it, once each.
"""

from dataclasses import dataclass

import numpy as np

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.planner.ranks import BoolArray, RankTable
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
    experts = np.array([template.experts for template in model.templates])[records.template[record]]
    owner, owners = _owner_sets(model, records, train, (record, unit, run, experts))
    demand, wanting = _demand_sets(model, records, engine, (record, unit, run, experts))
    for found, what in ((owners, "no trainer rank owns"), (wanting, "no engine rank wants")):
        if not found.any(axis=1).all():
            index = np.flatnonzero(~found.any(axis=1))[0]
            lost = np.flatnonzero((owner if found is owners else demand) == index)[0]
            name = model.templates[records.template[record[lost]]].name
            raise CoverageError(f"{name} of unit {unit[lost]}: {what} expert {run[lost]} or one of its layers")
    demand, demands = _on_nodes(demand, wanting, topology)
    rows = records.rows[record]
    return Atoms(
        record, unit, run, span, rows * span, records.row_bytes[record], np.gcd(granule_rows, rows), owner, demand,
        owners, demands,
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
            cuts = np.union1d(train.expert_cuts(template.experts), engine.expert_cuts(template.experts))
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


_Keys = tuple[IntArray, IntArray, IntArray, IntArray]


def _distinct(*columns: IntArray) -> tuple[IntArray, list[IntArray]]:
    """For each row of the columns the number of its value among the distinct ones, and those."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, index, inverse = np.unique(code, return_index=True, return_inverse=True)
    return inverse, [column[index] for column in columns]


def _merge(sets: BoolArray, number: IntArray) -> tuple[IntArray, BoolArray]:
    """Give equal rows of `sets` one number."""
    _, index, inverse = np.unique(np.packbits(sets, axis=1), axis=0, return_index=True, return_inverse=True)
    return inverse.reshape(-1)[number], sets[index]


def _held(table: RankTable, unit: IntArray, expert: IntArray, experts: IntArray) -> BoolArray:
    """[keys, ranks]: the rank has the unit and, where there are experts, the expert."""
    held = table.holds[unit][:, table.stage_of]
    for count in np.unique(experts[experts > 0]):
        spans = table.experts[int(count)]
        concerned = experts == count
        first = expert[concerned, None]
        held[concerned] &= (spans[None, :, 0] <= first) & (first < spans[None, :, 1])
    return held


def _stage_patterns(table: RankTable) -> IntArray:
    """[units]: equal for units that the same stages hold."""
    return np.unique(table.holds, axis=0, return_inverse=True)[1].reshape(-1)


def _owner_sets(model: Signatures, records: Records, table: RankTable, keys: _Keys) -> tuple[IntArray, BoolArray]:
    record, unit, expert, experts = keys
    axes = sorted({parameter.axis for parameter in model.train_parameters}, key=lambda axis: axis.value)
    axis_of = np.array([axes.index(parameter.axis) for parameter in model.train_parameters])
    pattern = _stage_patterns(table)
    axis = axis_of[records.source[record]]
    number, (axis, part, _, expert, experts, unit) = _distinct_with_unit(
        axis, records.part[record], pattern[unit], expert, experts, unit
    )
    sets = _held(table, unit, expert, experts)
    sets &= np.stack([table.parts[a] for a in axes])[axis] == part[:, None]
    return _merge(sets, number)


def _demand_sets(model: Signatures, records: Records, table: RankTable, keys: _Keys) -> tuple[IntArray, BoolArray]:
    record, unit, expert, experts = keys
    takes = np.zeros((len(records), table.ranks), dtype=bool)
    axes = [parameter.axis for parameter in model.engine_parameters]
    parts = np.stack([table.parts[axis] for axis in axes])
    of = np.repeat(np.arange(len(records)), np.diff(records.first_destination))
    np.logical_or.at(takes, of, parts[records.destination] == records.destination_part[:, None])
    taking, kinds = _merge(takes, np.arange(len(records)))
    pattern = _stage_patterns(table)
    number, (kind, _, expert, experts, unit) = _distinct_with_unit(
        taking[record], pattern[unit], expert, experts, unit
    )
    return _merge(_held(table, unit, expert, experts) & kinds[kind], number)


def _distinct_with_unit(*columns: IntArray) -> tuple[IntArray, list[IntArray]]:
    """Distinct but for the last column (the unit), of which any stands for those of its pattern."""
    number, _ = _distinct(*columns[:-1])
    _, index = np.unique(number, return_index=True)
    return number, [column[index] for column in columns]


def _on_nodes(demand: IntArray, wanting: BoolArray, topology: Topology) -> tuple[IntArray, BoolArray]:
    """Demand sets of ranks as sets of slots of each class of nodes; every replica of a shared node wants the same."""
    demands = np.zeros((len(wanting), topology.classes, topology.slots), dtype=bool)
    for rank in range(topology.engine_ranks):
        for copy in range(topology.copies_per_node):
            node, slot = topology.class_and_slot(rank, copy)
            demands[:, node, slot] = wanting[:, rank]
    return demand, demands
