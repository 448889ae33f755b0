"""Rings: how a parcel gets from its sender to every node of a class, and in which round.

The nodes of one class hold the same shards. For each class and slot their NICs form a ring (or a few): the sender
injects a parcel at one node, the head, and each node passes it on until the node before the head has it. The ring is
slotted: in every round all NICs receive, each slot moves on by one node, and a slot that has passed every node takes
the next parcel, at the node where it then is. So heads rotate, no NIC receives or sends twice in a round, and nothing
waits for a chain to fill.

Flows in: parcels with entries. Flows out: `Turns`, one per parcel, class and ring. Invariant: in a round a trainer's
NIC injects at most once and a ring takes in at most as many parcels as it has slots that are then free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from slimerl.resharding.planner.parcels import Parcels
from slimerl.resharding.planner.templates import IntArray

EASE = 0.6
"""A trainer injects in at most this part of the rounds open to it, so that first fit finds one soon."""


@dataclass(frozen=True)
class Turns:
    """One entry per parcel, class of nodes that takes it, and ring."""

    parcel: IntArray
    node: IntArray
    """The class."""
    group: IntArray
    """Which of the rings."""
    slot: IntArray
    head: IntArray
    """The place in the ring that gets it first."""
    round: IntArray
    """In which it does."""
    feeder: IntArray
    """-1: the parcel's trainer; else the turn, of another class, one of whose members passes it on to this class."""

    def __len__(self) -> int:
        return len(self.parcel)


def lanes_of(parcels: Parcels, slot: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Parcel, class and lane of every (parcel, class): lanes are numbered class by class, slot by slot."""
    parcel, node = np.nonzero(parcels.nodes_of_route[parcels.route])
    return parcel, node, node * parcels.routes.shape[2] + slot[parcel]


def finer_at_the_end(parcels: Parcels, slot: IntArray, members: int, pieces: int, least: int) -> IntArray:
    """Into how many each parcel is to be split, so that the rings run empty fast and together.

    The last turn of each lane is cut into `pieces`: what is left when the trainers have sent all is as long as the
    parcels are large. Then large parcels are halved until a lane has whole turns.
    """
    parcel, _, lane = lanes_of(parcels, slot)
    order = _in_order(parcels, parcel, lane)
    counts = np.ones(len(parcels), dtype=np.int64)
    for number in np.unique(lane):
        last = parcel[order][lane[order] == number][-members:]
        counts[last] = np.maximum(counts[last], np.clip(parcels.nbytes[last] // least, 1, pieces))
    single = np.bincount(parcel, minlength=len(parcels)) == 1
    for number in np.unique(lane):
        mine = parcel[lane == number]
        heap = [(-int(parcels.nbytes[p] // counts[p]), int(p)) for p in mine[single[mine]].tolist()]
        heapify(heap)
        for _ in range(-int(counts[mine].sum()) % members if heap else 0):
            size, largest = heap[0]
            if -size < 2 * least:
                break
            counts[largest] += 1
            heapreplace(heap, (-int(parcels.nbytes[largest] // counts[largest]), largest))
    return counts


def schedule(parcels: Parcels, slot: IntArray, rings: Sequence[IntArray], relay_classes: bool) -> Turns:
    """Give every turn a head and a round.

    `relay_classes`: the trainer injects one copy and the classes of nodes pass it on to each other; else it injects
    one copy into every class.
    """
    parcel, node, lane = lanes_of(parcels, slot)
    previous = np.full(len(parcel), -1, dtype=np.int64)
    order = _in_order(parcels, parcel, lane)
    if relay_classes:
        parcel, node, lane, previous, order = _chain_classes(parcels, parcel, node, lane, order)
    count, groups = len(parcel), len(rings)
    group = np.repeat(np.arange(groups), count)
    line = _Line(
        np.tile(parcels.root[parcel], groups),
        np.tile(lane, groups) * groups + group,
        group,
        (np.tile(previous, groups) + group * count) * np.tile(previous >= 0, groups) - np.tile(previous < 0, groups),
        (order[:, None] + count * np.arange(groups)[None, :]).ravel(),
    )
    head, when = _first_fit(line, [len(ring) for ring in rings])
    parcel = np.tile(parcel, groups)
    return Turns(parcel, np.tile(node, groups), group, slot[parcel], head, when, line.previous)


def _in_order(parcels: Parcels, parcel: IntArray, ring: IntArray) -> IntArray:
    """Each sender's parcels window by window, large ones first, and the senders so that all end together."""
    root = parcels.root[parcel]
    by_root = np.lexsort((ring, -parcels.nbytes[parcel], parcels.window[parcel], root))
    counts = np.bincount(root)
    start = np.cumsum(counts) - counts
    done = np.empty(len(root))
    done[by_root] = (np.arange(len(root)) - start[root[by_root]] + 0.5) / counts[root[by_root]]
    return np.lexsort((ring, root, done))


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


@dataclass(frozen=True)
class _Line:
    root: IntArray
    ring: IntArray
    group: IntArray
    previous: IntArray
    order: IntArray


def _phases(line: _Line, lengths: Sequence[int]) -> list[int]:
    """For each group, in how many rounds of a turn of its rings parcels may come in: few, so that all end together."""
    busiest = int(np.bincount(line.root[line.previous < 0]).max(initial=1))
    longest = int(np.bincount(line.ring).max(initial=1))
    found = []
    for length in lengths:
        open_to_each = max(1, int(longest / length * EASE))
        found.append(min(length, max(1, -(-busiest // open_to_each))))
    return found


def _first_fit(line: _Line, lengths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Each turn takes the first open injection; sets of rounds are the bits of integers. Returns heads and rounds."""
    sender: dict[int, int] = {}
    calendars = [_Calendar(length, phases) for length, phases in zip(lengths, _phases(line, lengths), strict=True)]
    head, when = np.zeros((2, len(line.ring)), dtype=np.int64)
    roots, rings, groups, before = (x.tolist() for x in (line.root, line.ring, line.group, line.previous))
    for turn in line.order.tolist():
        ring, fed_by, calendar = rings[turn], before[turn], calendars[groups[turn]]
        if fed_by < 0:
            round_ = calendar.first_free(ring, sender.get(roots[turn], 0))
            sender[roots[turn]] = sender.get(roots[turn], 0) | 1 << round_
        else:
            round_ = calendar.first_fed(ring, int(when[fed_by]), int(head[fed_by]))
        when[turn], head[turn] = round_, calendar.take(ring, round_)
    return head, when


def hops_to_feeder(fed_head: int | IntArray, head: int | IntArray, length: int) -> int | IntArray:
    """From the head of a ring to the member that feeds another class, whose ring begins at `fed_head`.

    That is the member before: parcels of its own ring that begin at `fed_head` end with it, so it sends less than the
    others and has room.
    """
    return (fed_head - 1 - head) % length


class _Calendar:
    """Injections into all rings of one length: in rounds whose number modulo the length is below `phases`."""

    def __init__(self, length: int, phases: int) -> None:
        self._length = length
        self._first_slot = [phase * length // phases for phase in range(phases + 1)]
        self._turn = (1 << phases) - 1
        self._open = 0
        self._horizon = 0
        self._full: dict[int, int] = {}
        self._taken: dict[tuple[int, int], int] = {}

    def first_free(self, ring: int, busy: int) -> int:
        """The first round in which the ring has an open slot and that is not in the set `busy`."""
        busy |= self._full.get(ring, 0)
        while not (free := self._open & ~busy):
            self._extend()
        return (free & -free).bit_length() - 1

    def _extend(self) -> None:
        for _ in range(64):
            self._open |= self._turn << self._horizon
            self._horizon += self._length

    def first_fed(self, ring: int, round_: int, head: int) -> int:
        """The first round in which the feeder has what the `head` of its ring takes in at `round_`."""
        busy = (1 << (round_ + 1)) - 1
        while True:
            found = self.first_free(ring, busy)
            if found > round_ + hops_to_feeder(self._head(ring, found), head, self._length):
                return found
            busy |= 1 << found

    def take(self, ring: int, round_: int) -> int:
        """Head of the ring's next slot in that round."""
        found = self._head(ring, round_)
        index = self._taken.get((ring, round_), 0) + 1
        self._taken[ring, round_] = index
        phase = round_ % self._length
        if self._first_slot[phase] + index == self._first_slot[phase + 1]:
            self._full[ring] = self._full.get(ring, 0) | 1 << round_
        return found

    def _head(self, ring: int, round_: int) -> int:
        """The member at which the ring's next free slot is in that round."""
        phase = round_ % self._length
        return (self._first_slot[phase] + self._taken.get((ring, round_), 0) + phase) % self._length
