"""Parcels: what one network operation carries. Fragments of one sender with one route, packed up to a size.

Flows in: atoms, shares of the senders. Flows out: fragments in order, and the parcels that hold them.
Invariant: the fragments of an atom are consecutive row ranges, each in one parcel; all fragments of a parcel leave
from one trainer rank, go to the same classes of nodes and belong to one window. A window has whole layers, so that
what an engine fuses (q|k|v, gate|up, data and scale) is always in one window.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slimerl.resharding.planner.atoms import Atoms
from slimerl.resharding.planner.lines import cut_line
from slimerl.resharding.planner.ranks import BoolArray, some
from slimerl.resharding.planner.templates import IntArray
from slimerl.resharding.planner.waterfill import FloatArray


@dataclass(frozen=True)
class Fragments:
    """Rows `first` to `stop` of `atom`, sent by trainer rank `root`; sorted by parcel."""

    atom: IntArray
    first: IntArray
    stop: IntArray
    root: IntArray

    def __len__(self) -> int:
        return len(self.atom)

    def nbytes(self, atoms: Atoms) -> IntArray:
        return (self.stop - self.first) * atoms.row_bytes[self.atom]

    def take(self, index: IntArray) -> "Fragments":
        return Fragments(self.atom[index], self.first[index], self.stop[index], self.root[index])


@dataclass(frozen=True)
class Parcels:
    """One entry a parcel; its fragments are `first_fragment[p]` to `first_fragment[p + 1]`."""

    root: IntArray
    route: IntArray
    window: IntArray
    nbytes: IntArray
    first_fragment: IntArray
    routes: BoolArray
    """[routes, classes, slots]: GPUs that want some of it."""

    @cached_property
    def nodes_of_route(self) -> BoolArray:
        """[routes, classes]: which nodes take its parcels."""
        return some(self.routes, 2)

    def __len__(self) -> int:
        return len(self.root)


def split_over_owners(atoms: Atoms, place: IntArray, weight: IntArray, shares: FloatArray, least: int) -> Fragments:
    """Cut each owner set's line of atoms so that every owner sends its share.

    `place`: of a unit in its stage; `weight`: how many copies of an atom leave the trainer. An owner's part is mostly
    whole layers, so its parcels are large, and those of n owners are each n-th layer, so that all of them have
    something for every window.
    """
    turn = place[atoms.unit] % atoms.owners.sum(axis=1)[atoms.owner]
    order = np.lexsort((atoms.expert, atoms.record, atoms.unit, turn, atoms.owner))
    set_of, rank = np.nonzero(shares > 0)
    totals = np.bincount(atoms.owner, weights=atoms.nbytes * weight, minlength=len(atoms.owners))
    start = np.r_[0.0, np.cumsum(totals)][:-1]
    ends = np.cumsum(shares[set_of, rank])
    first_of_set = np.searchsorted(set_of, np.arange(len(totals)))
    before = np.r_[0.0, ends][first_of_set]
    cuts = start[set_of] + ends - before[set_of]
    # The last owner of a set ends where the set does, whatever the rounding.
    last = np.r_[set_of[1:] != set_of[:-1], True]
    cuts[last] = (start + totals)[set_of[last]]
    cuts = np.maximum.accumulate(cuts)[:-1]
    pieces = cut_line(atoms.rows[order], (atoms.row_bytes * weight)[order], atoms.granule[order], cuts, least)
    # A cut that moved to a set's border must not hand an atom to the neighbouring set's rank.
    owner = atoms.owner[order][pieces.item]
    low, high = first_of_set[owner], np.r_[first_of_set[1:], len(set_of)][owner] - 1
    return Fragments(order[pieces.item], pieces.first, pieces.stop, rank[np.clip(pieces.bin, low, high)])


def make_routes(atoms: Atoms, by_node: bool) -> tuple[IntArray, BoolArray]:
    """The route of each demand set and the GPUs that a route serves.

    `by_node`: one route for all GPUs of a node, which pass on to each other what they took in: fewer, larger parcels.
    """
    keys = some(atoms.demands, 2) if by_node else atoms.demands.reshape(len(atoms.demands), -1)
    _, route = np.unique(np.packbits(keys, axis=1), axis=0, return_inverse=True)
    route = route.reshape(-1)
    routes = np.zeros((int(route.max()) + 1, *atoms.demands.shape[1:]), dtype=bool)
    np.logical_or.at(routes, route, atoms.demands)
    return route, routes


def choose_size(
    fragments: Fragments, atoms: Atoms, keys: IntArray, routes: BoolArray, per_nic: float, least: int, most: int
) -> tuple[int, bool]:
    """The smallest parcel size with at most `per_nic` parcels into each NIC, and whether there is one up to `most`.

    `keys`: [fragments, 3] as in `pack`.
    """
    groups, sizes = _groups(fragments, atoms, keys)
    takers = some(routes, 1)[groups[:, 1]]
    spread = takers / takers.sum(axis=1, keepdims=True)
    crossing = some(routes, 2)[groups[:, 1]].astype(np.float64)
    size = float(max(least, (sizes @ crossing).max() / (routes.shape[2] * per_nic)))
    while size < most:
        counts = -(-sizes // int(size))
        if (crossing.T @ (spread * counts[:, None])).max() <= per_nic:
            return int(size), True
        size *= 1.05
    return most, False


def group_keys(fragments: Fragments, atoms: Atoms, window: IntArray, route: IntArray) -> IntArray:
    """[fragments, 3]: root, route and window of each."""
    return np.stack([fragments.root, route[atoms.demand[fragments.atom]], window[atoms.unit[fragments.atom]]], axis=1)


def _groups(fragments: Fragments, atoms: Atoms, keys: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct keys and the bytes of each."""
    base = keys.max(axis=0) + 1
    _, index, inverse = np.unique(
        np.ravel_multi_index(tuple(keys.T), tuple(base)), return_index=True, return_inverse=True
    )
    return keys[index], np.bincount(inverse, weights=fragments.nbytes(atoms)).astype(np.int64)


def pack(
    fragments: Fragments, atoms: Atoms, keys: IntArray, routes: BoolArray, size: int, least: int
) -> tuple[Fragments, Parcels]:
    """Fill parcels of about equal size, at most `size` bytes, from the fragments of each (root, route, window)."""
    order = np.lexsort((fragments.first, atoms.expert[fragments.atom], atoms.record[fragments.atom],
                        atoms.unit[fragments.atom], keys[:, 1], keys[:, 0], keys[:, 2]))  # fmt: skip
    fragments, keys = fragments.take(order), keys[order]
    nbytes = fragments.nbytes(atoms)
    new = np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)]
    start = np.r_[0, np.cumsum(nbytes)][:-1][new].astype(np.float64)
    sizes = np.add.reduceat(nbytes, np.flatnonzero(new))
    counts = -(-sizes // size)
    return _cut(fragments, atoms, keys, routes, (start, sizes, counts), least)[:2]


def split_parcels(
    fragments: Fragments, atoms: Atoms, parcels: Parcels, counts: IntArray, least: int
) -> tuple[Fragments, Parcels, IntArray]:
    """Cut each parcel into `counts` equal ones, in the same order; also returns of which parcel each is a part."""
    of = np.repeat(np.arange(len(parcels)), np.diff(parcels.first_fragment))
    keys = np.stack([parcels.root[of], parcels.route[of], parcels.window[of]], axis=1)
    start = np.r_[0, np.cumsum(parcels.nbytes)][:-1].astype(np.float64)
    return _cut(fragments, atoms, keys, parcels.routes, (start, parcels.nbytes, counts), least)


def _cut(
    fragments: Fragments,
    atoms: Atoms,
    keys: IntArray,
    routes: BoolArray,
    line: tuple[FloatArray, IntArray, IntArray],
    least: int,
) -> tuple[Fragments, Parcels, IntArray]:
    """Cut the line of fragments: `counts` equal parcels for each stretch of `sizes` bytes that begins at `start`."""
    start, sizes, counts = line
    which = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    cuts = (start[which] + sizes[which] * (step / counts[which]))[1:]
    atom = fragments.atom
    pieces = cut_line(fragments.stop - fragments.first, atoms.row_bytes[atom], atoms.granule[atom], cuts, least)
    split = Fragments(
        atom[pieces.item],
        fragments.first[pieces.item] + pieces.first,
        fragments.first[pieces.item] + pieces.stop,
        fragments.root[pieces.item],
    )
    # Cuts that fell together leave a bin empty.
    bins, first = np.unique(pieces.bin, return_index=True)
    key = keys[pieces.item][first]
    nbytes = np.add.reduceat(split.nbytes(atoms), first)
    return split, Parcels(key[:, 0], key[:, 1], key[:, 2], nbytes, np.r_[first, len(split)], routes), which[bins]
