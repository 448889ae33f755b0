"""One rank's share of a plan: what it sends and receives, and which parts of its parameters that is.

Flows in: a plan, a rank. Flows out: `Share`, a selection over the plan's arrays. Invariant: the segments of a parcel
follow each other on the wire, row after row, in the same order for its sender and all its receivers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slimerl.resharding.planner.plan import Plan
from slimerl.resharding.planner.ranks import RankTable
from slimerl.resharding.planner.templates import IntArray, Parameter

NO_SLICE = -1


class Segments(NamedTuple):
    """Boxes of a rank's parameters and where they are in their parcels; sorted by parcel and offset."""

    parcel: IntArray
    offset: IntArray
    """In the parcel, in bytes."""
    parameter: IntArray
    """Index into the names of the share."""
    slice: IntArray
    """First dimension of a stacked parameter; NO_SLICE where there is none."""
    row: IntArray
    rows: IntArray
    column: IntArray
    columns: IntArray
    itemsize: IntArray
    """Of an element on the wire."""


@dataclass(frozen=True)
class Share:
    """`sends` and `receives` are numbers of operations in the order in which they are due."""

    sends: IntArray
    receives: IntArray
    names: tuple[str, ...]
    scales: tuple[bool, ...]
    """For each name: not the parameter, but the scales that a trainer's quantiser makes of it (`Parameter.scales`)."""
    segments: Segments
    """Trainer: what goes into its parcels. Engine: what it stores of the parcels that its node takes in, by whichever
    GPU they enter."""


def trainer_share(plan: Plan, rank: int) -> Share:
    """Of the trainer's rank `rank`."""
    pieces = _by_expert(plan, np.flatnonzero(plan.fragments.root == rank))
    records, table = plan.template.records, plan.template.train
    source = records.source[pieces.record]
    box = records.source_row[pieces.record] + pieces.row, records.source_column[pieces.record]
    return _share(plan, rank, table, plan.template.model.train_parameters, rank, pieces, source, box)


def engine_share(plan: Plan, replica: int, rank: int) -> Share:
    """Of rank `rank` of engine `replica`."""
    topology, template = plan.topology, plan.template
    nic = topology.trainer_ranks + replica * topology.engine_ranks + rank
    node, slot = topology.class_and_slot(rank, replica % topology.copies_per_node)
    wanted = template.atoms.demands[:, node, slot][template.atoms.demand[plan.fragments.atom]]
    pieces = _by_expert(plan, np.flatnonzero(wanted))
    # Each destination of a record that is the rank's: mostly one.
    records, table = template.records, template.engine
    parameters = template.model.engine_parameters
    parts = np.array([table.parts[parameter.axis][rank] for parameter in parameters])
    ours = np.flatnonzero(records.destination_part == parts[records.destination])
    counts = np.bincount(np.repeat(np.arange(len(records)), np.diff(records.first_destination))[ours],
                         minlength=len(records))  # fmt: skip
    begins = np.cumsum(counts) - counts
    times = counts[pieces.record]
    entry = ours[np.repeat(begins[pieces.record], times) + _count_up(times)]
    pieces = _Pieces(*(np.repeat(column, times) for column in pieces))
    box = records.destination_row[entry] + pieces.row, records.destination_column[entry]
    return _share(plan, nic, table, parameters, rank, pieces, records.destination[entry], box)


class _Pieces(NamedTuple):
    """Rows of fragments, expert by expert."""

    parcel: IntArray
    offset: IntArray
    record: IntArray
    unit: IntArray
    expert: IntArray
    row: IntArray
    """In the record."""
    rows: IntArray


def _count_up(counts: IntArray) -> IntArray:
    """0, 1, ... for each count."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _by_expert(plan: Plan, fragment: IntArray) -> _Pieces:
    fragments, atoms = plan.fragments, plan.template.atoms
    atom, first, stop = fragments.atom[fragment], fragments.first[fragment], fragments.stop[fragment]
    height = plan.template.records.rows[atoms.record[atom]]
    times = (stop - 1) // height - first // height + 1
    again = np.repeat(np.arange(len(fragment)), times)
    expert = first[again] // height[again] + _count_up(times)
    low = np.maximum(first[again], expert * height[again])
    high = np.minimum(stop[again], (expert + 1) * height[again])
    offset = plan.offset_of_fragment[fragment][again] + (low - first[again]) * atoms.row_bytes[atom[again]]
    return _Pieces(
        plan.parcel_of_fragment[fragment][again],
        offset,
        atoms.record[atom[again]],
        atoms.unit[atom[again]],
        atoms.expert[atom[again]] + expert,
        low - expert * height[again],
        high - low,
    )


def _share(
    plan: Plan,
    nic: int,
    table: RankTable,
    parameters: tuple[Parameter, ...],
    rank: int,
    pieces: _Pieces,
    parameter: IntArray,
    box: tuple[IntArray, IntArray],
) -> Share:
    """Find the place of each piece's expert in the rank, and name the parameters."""
    index, place = _places(table, parameters, rank, pieces, parameter)
    pieces, parameter = _Pieces(*(column[index] for column in pieces)), parameter[index]
    stacked = np.array([p.stacked for p in parameters])[parameter]
    in_name = np.where(stacked, 0, place)
    units = table.units
    code = (parameter * units + pieces.unit) * (int(in_name.max(initial=0)) + 1) + in_name
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    stage = table.stages[int(table.stage_of[rank])]
    names = []
    for at in first.tolist():
        prefix, layer = stage[int(pieces.unit[at])]
        names.append(prefix + parameters[parameter[at]].name.format(layer=layer, expert=int(in_name[at])))
    records = plan.template.records
    segments = Segments(
        pieces.parcel,
        pieces.offset,
        number.reshape(-1),
        np.where(stacked, place, NO_SLICE),
        box[0][index],
        pieces.rows,
        box[1][index],
        records.columns[pieces.record],
        records.itemsize[pieces.record],
    )
    order = np.lexsort((segments.offset, segments.parcel))
    sends, receives = (group[0][group[1][nic] : group[1][nic + 1]] for group in (plan.by_sender, plan.by_receiver))
    scales = tuple(parameters[parameter[at]].scales for at in first.tolist())
    return Share(sends, receives, tuple(names), scales, Segments(*(column[order] for column in segments)))


def _places(
    table: RankTable, parameters: tuple[Parameter, ...], rank: int, pieces: _Pieces, parameter: IntArray
) -> tuple[IntArray, IntArray]:
    """Pieces, some of them repeated, and the place of each one's expert among the rank's."""
    index, place = [], []
    for number in np.unique(parameter):
        kind = parameters[int(number)]
        mine = np.flatnonzero(parameter == number)
        if not kind.experts:
            behind = table.places[kind.behind, kind.location].shape[2] if kind.behind else 0
            index.append(mine)
            place.append(np.full(len(mine), behind))
            continue
        key = kind.experts, kind.location
        held = table.places[key][table.layer_of(pieces.unit[mine], key), rank]
        piece, found = np.nonzero(held == pieces.expert[mine, None])
        index.append(mine[piece])
        place.append(found)
    if not index:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(index), np.concatenate(place)
