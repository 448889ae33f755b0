"""Levelling: share the bytes of every owner set among its ranks, so that the fullest NIC is as empty as can be.

Flows in: owner sets, their bytes, NIC speeds. Flows out: bytes for each (set, rank), and a lower bound with its proof.
Invariant: each set's shares add up to its bytes and go to its own ranks only.

The shares with the least sum of squared loads also have the least maximum (the loads are a base of a polymatroid), so
each sweep levels one layer of disjoint sets against all others, exactly, until nothing moves.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.planner.ranks import BoolArray
from slimerl.resharding.planner.templates import IntArray

FloatArray = NDArray[np.float64]

SWEEPS = 200
"""Far more than layouts need (3 to 40); a bound for the loop."""
SETTLED = 1e-4
"""A sweep that lowers the maximum by less than this part ends the search, once the bound is as near or it is idle."""


class Level(NamedTuple):
    """Who sends how much."""

    shares: FloatArray
    """[sets, ranks], bytes."""
    seconds: FloatArray
    """[ranks]"""
    bound_s: float
    """No assignment is faster: some set of ranks must send what it alone owns."""


def level(owners: BoolArray, nbytes: FloatArray, speeds: FloatArray) -> Level:
    """Shares that minimise the seconds of the slowest rank (`speeds` in bytes per second)."""
    layers = _disjoint_layers(owners)
    shares = np.zeros(owners.shape)
    loads = np.zeros(owners.shape[1])
    before = np.inf
    for _ in range(SWEEPS):
        for label in layers:
            present = np.flatnonzero(label >= 0)
            mine = shares[label[present], present]
            loads[present] -= mine
            mine = _fill(label[present], loads[present], nbytes, speeds[present])
            shares[label[present], present] = mine
            loads[present] += mine
        slowest = float((loads / speeds).max())
        if len(layers) == 1 or slowest >= before * (1 - SETTLED):
            break
        before = slowest
    seconds = loads / speeds
    return Level(shares, seconds, egress_bound(owners, nbytes, seconds, speeds))


def _disjoint_layers(owners: BoolArray) -> list[IntArray]:
    """Labels [ranks] for groups of pairwise disjoint sets: the set that a rank is in, -1 for none."""
    order = np.lexsort((owners.argmax(axis=1), owners.sum(axis=1)))
    masks = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(owners, axis=1, bitorder="little")]
    taken: list[int] = []
    labels: list[IntArray] = []
    for index in order:
        open_ = (layer for layer, used in enumerate(taken) if not used & masks[index])
        layer = next(open_, len(taken))
        if layer == len(taken):
            taken.append(0)
            labels.append(np.full(owners.shape[1], -1, dtype=np.int64))
        taken[layer] |= masks[index]
        labels[layer][owners[index]] = index
    return labels


def _fill(label: IntArray, loads: FloatArray, nbytes: FloatArray, speeds: FloatArray) -> FloatArray:
    """Pour `nbytes[label]` over the ranks of each label, whose loads stand at `loads`: the lowest fill first."""
    height = loads / speeds
    order = np.lexsort((height, label))
    sorted_label = label[order]
    starts = np.flatnonzero(np.r_[True, sorted_label[1:] != sorted_label[:-1]])
    width = speeds[order]
    volume = loads[order]
    sizes = np.diff(np.r_[starts, len(order)])

    def within(values: FloatArray) -> FloatArray:
        total = np.cumsum(values)
        return total - np.repeat(total[starts] - values[starts], sizes)

    # The level when only the lowest 1, 2, ... are used; the true one is the least of these.
    candidate = (nbytes[sorted_label] + within(volume)) / within(width)
    water = np.repeat(np.minimum.reduceat(candidate, starts), sizes)
    poured = np.empty(len(order))
    poured[order] = np.maximum(0.0, water - height[order]) * width
    return poured


def egress_bound(owners: BoolArray, nbytes: FloatArray, seconds: FloatArray, speeds: FloatArray) -> float:
    """The best bound of the form: what only the ranks X own, over their speed, for X = the ranks at a level or above.

    A bound for any `seconds`; the least possible time where these are the level's.
    """
    order = np.argsort(-seconds, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    # A set lies in X once its last rank is in.
    last = np.where(owners, place[None, :], -1).max(axis=1)
    alone = np.cumsum(np.bincount(last, weights=nbytes, minlength=len(order)))
    return float((alone / np.cumsum(speeds[order])).max())
