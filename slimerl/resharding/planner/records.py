"""Atoms of a template: the common refinement of both sides' cuts, as arrays of records.

Flows in: signatures. Flows out: `Records`: each is a box that one part of the trainer holds in one place, and that a
fixed set of engine parts wants. Invariant: the records of a template tile it, and carry every destination of it.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.planner.templates import (
    AT_COLUMN,
    AT_ROW,
    COLUMN,
    COLUMN_STOP,
    PARAMETER,
    PART,
    ROW,
    ROW_STOP,
    IntArray,
    Signatures,
    Template,
)

_TEMPLATE, _ROW, _COLUMN, _ROWS, _COLUMNS, _ITEMSIZE, _SOURCE_PART, _SOURCE, _SOURCE_ROW, _SOURCE_COLUMN = range(10)
"""Columns of a `head`: one row a record, in the order of the fields of `Records`."""
_RECORD, _DESTINATION, _DESTINATION_PART, _DESTINATION_ROW, _DESTINATION_COLUMN = range(5)
"""Columns of a `tail`: one row for each destination of a record."""


@dataclass(frozen=True)
class Records:
    """Struct of arrays, one entry a record; `destination_*` has one entry per record and engine part (CSR)."""

    template: IntArray
    row: IntArray
    column: IntArray
    rows: IntArray
    columns: IntArray
    itemsize: IntArray
    part: IntArray
    """The trainer's part that owns it."""
    source: IntArray
    """The trainer's parameter."""
    source_row: IntArray
    source_column: IntArray
    first_destination: IntArray
    """[records + 1]"""
    destination: IntArray
    """The engine's parameter."""
    destination_part: IntArray
    destination_row: IntArray
    destination_column: IntArray

    def __len__(self) -> int:
        return len(self.template)

    @property
    def row_bytes(self) -> IntArray:
        return self.columns * self.itemsize


def refine(model: Signatures) -> Records:
    """The records of every template.

    Raises:
        CoverageError: a box of a weight that the trainer does not hold, or that no engine rank takes.
    """
    heads, tails = [], []
    first = 0
    for number, template in enumerate(model.templates):
        head, tail = _refine(template, number)
        tail[:, _RECORD] += first
        first += len(head)
        heads.append(head)
        tails.append(tail)
    return _coalesce(np.concatenate(heads), np.concatenate(tails))


def _coalesce(head: IntArray, tail: IntArray) -> Records:
    """Make one record of records that follow each other in the trainer's parameter and in every destination.

    Gate and up of an expert become one strip where neither side cuts inside an expert.
    """
    tail = tail[np.lexsort((tail[:, _DESTINATION_PART], tail[:, _DESTINATION], tail[:, _RECORD]))]
    offsets = np.searchsorted(tail[:, _RECORD], np.arange(len(head) + 1))
    # How far each destination lies from the source: equal for records that follow each other on both sides.
    relative = tail.copy()
    relative[:, _DESTINATION_ROW] -= head[tail[:, _RECORD], _SOURCE_ROW]
    relative = np.ascontiguousarray(relative[:, _DESTINATION:])
    alike: dict[bytes, int] = {}
    where = [alike.setdefault(relative[start:stop].tobytes(), len(alike)) for start, stop in pairwise(offsets)]
    same = np.column_stack([head[:, [_SOURCE, _SOURCE_PART, _SOURCE_COLUMN, _COLUMNS, _ITEMSIZE]], where])
    order = np.lexsort((head[:, _SOURCE_ROW], *same.T))
    before, behind = order[:-1], order[1:]
    follows = (same[before] == same[behind]).all(axis=1)
    follows &= head[before, _SOURCE_ROW] + head[before, _ROWS] == head[behind, _SOURCE_ROW]
    leader = order[np.maximum.accumulate(np.where(np.r_[True, ~follows], np.arange(len(order)), 0))]
    head = head.copy()
    rows = np.zeros(len(head), dtype=np.int64)
    np.add.at(rows, leader, head[order, _ROWS])
    head[:, _ROWS] = rows
    kept = np.flatnonzero(rows)
    counts = np.diff(offsets)[kept]
    tail = tail[np.isin(tail[:, _RECORD], kept)]
    columns: list[IntArray] = [*head[kept].T.copy(), np.r_[0, np.cumsum(counts)], *tail[:, _DESTINATION:].T.copy()]
    return Records(*columns)


def _refine(template: Template, number: int) -> tuple[IntArray, IntArray]:
    """Head and tail of the cells of the grid of all cuts."""
    rows = np.unique(np.concatenate([side[:, [ROW, ROW_STOP]].ravel() for side in (template.train, template.engine)]))
    columns = np.unique(
        np.concatenate([side[:, [COLUMN, COLUMN_STOP]].ravel() for side in (template.train, template.engine)])
    )
    _check_ends(template, rows, columns)
    shape = len(rows) - 1, len(columns) - 1
    # A box that several parts of the trainer hold belongs to the first of them.
    owner = np.full(shape, -1, dtype=np.int64)
    for index in range(len(template.train) - 1, -1, -1):
        owner[_cells(template.train[index], rows, columns)] = index
    wanted = np.zeros((len(template.engine), *shape), dtype=bool)
    for index, piece in enumerate(template.engine):
        wanted[(index, *_cells(piece, rows, columns))] = True
    if (owner < 0).any():
        raise CoverageError(f"{template.name}: the trainer does not hold all of it")
    if not wanted.any(axis=0).all():
        raise CoverageError(f"{template.name}: no engine rank takes some of it")
    row, column = (grid.ravel() for grid in np.meshgrid(rows[:-1], columns[:-1], indexing="ij"))
    height, width = (grid.ravel() for grid in np.meshgrid(np.diff(rows), np.diff(columns), indexing="ij"))
    source = template.train[owner.ravel()]
    head = np.empty((len(row), 10), dtype=np.int64)
    head[:, _TEMPLATE], head[:, _ITEMSIZE] = number, template.itemsize
    head[:, _ROW], head[:, _COLUMN], head[:, _ROWS], head[:, _COLUMNS] = row, column, height, width
    head[:, _SOURCE_PART], head[:, _SOURCE] = source[:, PART], source[:, PARAMETER]
    head[:, _SOURCE_ROW] = source[:, AT_ROW] + row - source[:, ROW]
    head[:, _SOURCE_COLUMN] = source[:, AT_COLUMN] + column - source[:, COLUMN]
    taker, cell = np.nonzero(wanted.reshape(len(template.engine), -1))
    piece = template.engine[taker]
    tail = np.stack(
        [
            cell,
            piece[:, PARAMETER],
            piece[:, PART],
            piece[:, AT_ROW] + row[cell] - piece[:, ROW],
            piece[:, AT_COLUMN] + column[cell] - piece[:, COLUMN],
        ],
        axis=1,
    )
    return head, tail


def _cells(piece: IntArray, rows: IntArray, columns: IntArray) -> tuple[slice, slice]:
    top, bottom = np.searchsorted(rows, piece[[ROW, ROW_STOP]])
    left, right = np.searchsorted(columns, piece[[COLUMN, COLUMN_STOP]])
    return slice(top, bottom), slice(left, right)


def _check_ends(template: Template, rows: IntArray, columns: IntArray) -> None:
    if (rows[0], columns[0]) != (0, 0) or (rows[-1], columns[-1]) != template.extent:
        raise CoverageError(
            f"{template.name}: placements span rows {rows[0]} to {rows[-1]} and columns {columns[0]} to {columns[-1]} "
            f"of {template.extent.rows} x {template.extent.columns}"
        )
