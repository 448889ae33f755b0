"""Cutting a line of row blocks into pieces: the one way in which atoms are split, over owners and into parcels.

Flows in: items of rows, and byte positions on the line of all items one after another. Flows out: pieces.
Invariant: the pieces of an item are consecutive row ranges that together are all its rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.planner.templates import IntArray


class Pieces(NamedTuple):
    """Rows `first` to `stop` of `item`, in bin `bin`: the number of cuts before it."""

    item: IntArray
    first: IntArray
    stop: IntArray
    bin: IntArray


def cut_line(
    rows: IntArray, row_bytes: IntArray, granule: IntArray, cuts: NDArray[np.float64], least_bytes: int
) -> Pieces:
    """Cut the items at the byte positions `cuts` (rising), each moved to the nearest allowed row.

    Allowed are multiples of the item's `granule` and the item's ends; an end within `least_bytes` is preferred.
    """
    row_start = np.r_[0, np.cumsum(rows)]
    byte_start = np.r_[0.0, np.cumsum(rows * row_bytes, dtype=np.float64)]
    at = np.searchsorted(byte_start, cuts, side="right") - 1
    at = np.clip(at, 0, len(rows) - 1)
    inside = (cuts - byte_start[at]) / row_bytes[at]
    row = np.rint(inside / granule[at]).astype(np.int64) * granule[at]
    early, late = row * row_bytes[at] < least_bytes, (rows[at] - row) * row_bytes[at] < least_bytes
    to_end = late & (~early | (2 * inside > rows[at]))
    row = np.where(to_end, rows[at], np.where(early, 0, row))
    cut_rows = np.maximum.accumulate(np.minimum(row_start[at] + row, row_start[-1])) if len(cuts) else row_start[:0]
    edges = np.unique(np.r_[row_start, cut_rows])
    item = np.searchsorted(row_start, edges[:-1], side="right") - 1
    return Pieces(
        item,
        edges[:-1] - row_start[item],
        edges[1:] - row_start[item],
        np.searchsorted(cut_rows, edges[:-1], side="right"),
    )
