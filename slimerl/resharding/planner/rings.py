"""Rings: how a parcel gets from its sender to every node of a class, and in which round.

The nodes of one class hold the same shards. For each class and slot their NICs form a ring: the sender injects a parcel
at one node, the head, and each node passes it on until the node before the head has it. The ring is slotted: in every
round all NICs receive, each slot moves on by one node, and a slot that has passed every node takes the next parcel, at
the node where it then is. So heads rotate, no NIC receives or sends twice in a round, and nothing waits for a chain
to fill.

Flows in: parcels with entries. Flows out: `Turns`, one per parcel and class. Invariant: in a round a trainer's NIC
injects at most once and a ring takes in at most as many parcels as it has slots of that phase.
"""

from dataclasses import dataclass

import numpy as np

from slimerl.resharding.planner.parcels import Parcels
from slimerl.resharding.planner.templates import IntArray

EASE = 0.6
"""A trainer injects in at most this part of the rounds open to it, so that first fit finds one soon."""


@dataclass(frozen=True)
class Turns:
    """One entry per parcel and class of nodes that takes it."""

    parcel: IntArray
    node: IntArray
    """The class."""
    slot: IntArray
    head: IntArray
    """The member of the ring that gets it first."""
    round: IntArray
    """In which it does."""
    feeder: IntArray
    """-1: the parcel's trainer; else the turn whose copy, at the same member, is passed on to this class."""

    def __len__(self) -> int:
        return len(self.parcel)


def turns_of(parcels: Parcels, slot: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Parcel, class and ring of every turn: the rings are numbered class by class, slot by slot."""
    takes = parcels.routes.any(axis=2)[parcels.route]
    parcel, node = np.nonzero(takes)
    return parcel, node, node * parcels.routes.shape[2] + slot[parcel]


def schedule(parcels: Parcels, slot: IntArray, members: int, relay_classes: bool) -> Turns:
    """Give every turn a head and a round.

    `relay_classes`: the trainer injects one copy and the classes of nodes pass it on to each other; else it injects
    one copy into every class.
    """
    parcel, node, ring = turns_of(parcels, slot)
    count = len(parcel)
    previous = np.full(count, -1, dtype=np.int64)
    order = _in_order(parcels, parcel, ring)
    if relay_classes:
        parcel, node, ring, previous, order = _chain_classes(parcels, parcel, node, ring, order)
    phases = _phases(parcels.root[parcel[previous < 0]], ring, members)
    head, when = _first_fit(_Line(parcels.root[parcel], ring, previous, order), members, phases)
    return Turns(parcel, node, slot[parcel], head, when, previous)


def _in_order(parcels: Parcels, parcel: IntArray, ring: IntArray) -> IntArray:
    """Window by window, large parcels first, the senders in turn."""
    root = parcels.root[parcel]
    by_root = np.lexsort((ring, -parcels.nbytes[parcel], root, parcels.window[parcel]))
    key = parcels.window[parcel][by_root] * (int(root.max(initial=0)) + 1) + root[by_root]
    start = np.maximum.accumulate(np.where(np.r_[True, key[1:] != key[:-1]], np.arange(len(key)), 0))
    turn = np.empty(len(key), dtype=np.int64)
    turn[by_root] = np.arange(len(key)) - start
    return np.lexsort((ring, root, turn, parcels.window[parcel]))


def _chain_classes(
    parcels: Parcels, parcel: IntArray, node: IntArray, ring: IntArray, order: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Order the turns so that those of a parcel follow each other, each fed by the one before.

    The class that comes first rotates from parcel to parcel, as the last one sends less.
    """
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    first = np.full(len(parcels), len(order), dtype=np.int64)
    np.minimum.at(first, parcel, rank)
    classes = parcels.routes.shape[1]
    turned = (node + first[parcel]) % classes
    place = np.lexsort((turned, first[parcel]))
    parcel, node, ring = parcel[place], node[place], ring[place]
    follows = np.r_[False, parcel[1:] == parcel[:-1]]
    index = np.arange(len(parcel))
    return parcel, node, ring, np.where(follows, index - 1, -1), index


def _phases(roots: IntArray, ring: IntArray, members: int) -> int:
    """In how many rounds of each turn of the ring parcels may come in: few, so that all slots start and end together."""
    busiest = int(np.bincount(roots).max(initial=1))
    turns = max(1, int(np.bincount(ring).max(initial=1)) // members)
    return min(members, max(1, -(-busiest // max(1, int(turns * EASE)))))


@dataclass(frozen=True)
class _Line:
    root: IntArray
    ring: IntArray
    previous: IntArray
    order: IntArray


def _first_fit(line: _Line, members: int, phases: int) -> tuple[IntArray, IntArray]:
    """Each turn takes the first open injection; sets of times are the bits of integers. Returns heads and rounds."""
    sender: dict[int, int] = {}
    calendar = _Calendar(members, phases)
    head, when = np.zeros((2, len(line.ring)), dtype=np.int64)
    roots, rings, before = line.root.tolist(), line.ring.tolist(), line.previous.tolist()
    for turn in line.order.tolist():
        ring, fed_by = rings[turn], before[turn]
        if fed_by < 0:
            time = calendar.first_free(ring, sender.get(roots[turn], 0))
            sender[roots[turn]] = sender.get(roots[turn], 0) | 1 << time
        else:
            time = calendar.first_after(ring, int(when[fed_by]), int(head[fed_by]))
        when[turn], head[turn] = calendar.take(ring, time)
    return head, when


class _Calendar:
    """Injections of all rings. Time t stands for round (t // phases) * members + t % phases."""

    def __init__(self, members: int, phases: int) -> None:
        self._members, self._phases = members, phases
        self._first_slot = [phase * members // phases for phase in range(phases + 1)]
        self._full: dict[int, int] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def first_free(self, ring: int, busy: int) -> int:
        """The first time at which the ring has an open slot and that is not in the set `busy`."""
        busy |= self._full.get(ring, 0)
        return (~busy & (busy + 1)).bit_length() - 1

    def first_after(self, ring: int, round_: int, head: int) -> int:
        """The first time whose head has got the parcel that another ring's `head` takes in at `round_`."""
        cycle, phase = divmod(round_ + 1, self._members)
        busy = (1 << (cycle * self._phases + min(phase, self._phases))) - 1
        while True:
            time = self.first_free(ring, busy)
            start, member = self._at(ring, time)
            if start > round_ + (member - head) % self._members:
                return time
            busy |= 1 << time

    def take(self, ring: int, time: int) -> tuple[int, int]:
        """Round and head of the ring's next slot at that time."""
        found = self._at(ring, time)
        index = self._taken.get((ring, time), 0) + 1
        self._taken[ring, time] = index
        phase = time % self._phases
        if self._first_slot[phase] + index == self._first_slot[phase + 1]:
            self._full[ring] = self._full.get(ring, 0) | 1 << time
        return found

    def _at(self, ring: int, time: int) -> tuple[int, int]:
        cycle, phase = divmod(time, self._phases)
        slot = self._first_slot[phase] + self._taken.get((ring, time), 0)
        return cycle * self._members + phase, (slot + phase) % self._members
