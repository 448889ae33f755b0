"""The books of the admission ledger, and the log from which they are made again. Pure: no clock, no I/O.

Flows in: `LedgerRecord`s, each of them a decision (`slimerl/rollout/ledger.py`). Flows out: where every group stands,
the orders for each shard, counts.

Invariants, the first checked after every record (in samples)::

    admitted = trained + buffered + running + dropped(by reason)

a group is at no more than one shard, and ends once: trained with its batch, or dropped as a whole. What a shard that
is lost had made of a group that no step has trained counts as never made: the group is made again, under the same ids
and so from the same seeds. The books are a function of the records: a ledger that starts again and applies them knows
all that the one before had told anybody.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from slimerl.rollout.admission import StalenessGate
from slimerl.samples.books import ConservationError, Counts, GroupView
from slimerl.samples.ledger_messages import Event, Held, LetGo, Make, Order, Returned, Settled, ShardJoin, Void


class LedgerGroup(msgspec.Struct, array_like=True):
    """A group that has been admitted and has not ended."""

    position: int
    version: int
    """Policy version when it was given to a shard last: what bounds its staleness."""
    shard: int | None
    """Who makes or has it. None: nobody; it is given to some shard as soon as one can take it."""
    settled: Settled | None = None
    step: int | None = None
    """Of the batch that it is in."""


class ShardBooks(msgspec.Struct, array_like=True):
    """`lost`: its lease ran out, and it has not joined again; `heard`: events booked of this incarnation; `ordered`:
    number of the newest order, which is the last of `orders`, those it may not know yet."""

    incarnation: int = 0
    lost: bool = False
    heard: int = 0
    ordered: int = 0
    orders: list[Order] = []


class Snapshot(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """All of the books. `cursor`: positions admitted so far; `accepted`: as the gate counts; `groups`: in order;
    `told`, `told_before`: as in `LedgerBooks`."""

    version: int
    cursor: int
    accepted: int
    batches_taken: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    groups: list[LedgerGroup]
    shards: list[ShardBooks]
    told: dict[str, int] = {}
    told_before: dict[str, int] = {}

    def payloads(self) -> set[str]:
        """The log has none."""
        return set()


class Assigned(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """A group goes to a shard; at the cursor it is a new one."""

    position: int
    shard: int


class Booked(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """An event of a shard; without effect where the group was taken from it before it knew."""

    shard: int
    number: int
    event: Event


class Joined(msgspec.Struct, frozen=True, tag="j", array_like=True):
    join: ShardJoin


class Lost(msgspec.Struct, frozen=True, tag="l", array_like=True):
    shard: int


class Advanced(msgspec.Struct, frozen=True, tag="v", array_like=True):
    version: int


class Leased(msgspec.Struct, frozen=True, tag="h", array_like=True):
    """`dropped`: samples by then, by reason, of which the batch tells those that are new."""

    step: int
    positions: list[int]
    dropped: dict[str, int] = {}


class GivenBack(msgspec.Struct, frozen=True, tag="g", array_like=True):
    step: int


class BatchEnded(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """The batch has been trained."""

    step: int


LedgerRecord = Snapshot | Assigned | Booked | Joined | Lost | Advanced | Leased | GivenBack | BatchEnded


@dataclass
class LedgerBooks:
    """`gate`: as it is before the first record."""

    gate: StalenessGate
    samples_per_group: int
    shards: list[ShardBooks]
    groups: dict[int, LedgerGroup] = field(default_factory=dict)
    """By position, in the order of their last admission."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Positions of those that are out, by step."""
    homeless: set[int] = field(default_factory=set)
    """Groups that no shard has and no batch holds."""
    cursor: int = 0
    batches_taken: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    """Of the dropped ones those that a batch has told of."""
    told_before: Counter[str] = field(default_factory=Counter)
    """The same, when the newest batch was made up."""
    buffered: int = 0
    settled: int = 0
    """Groups."""

    def apply(self, records: Iterable[LedgerRecord]) -> None:
        """Raises ConservationError: the books do not balance; KeyError: a record speaks of what is not there."""
        for record in records:
            self._apply(record)
            self.check()

    def counts(self) -> Counts:
        running = (len(self.groups) - self.settled) * self.samples_per_group
        return Counts(self.admitted, running, self.buffered, self.trained, dict(self.dropped))

    def views(self) -> list[GroupView]:
        """Groups that no batch holds, in order, each under its position."""
        return [
            GroupView(str(one.position), one.version, one.settled is not None)
            for one in self.groups.values()
            if one.step is None
        ]

    def ready(self) -> int:
        """Groups that a batch could take."""
        return self.settled - sum(map(len, self.batches.values()))

    def snapshot(self) -> Snapshot:
        groups = [msgspec.structs.replace(one) for one in self.groups.values()]
        shards = [msgspec.structs.replace(one, orders=list(one.orders)) for one in self.shards]
        counts = (self.gate.version, self.cursor, self.gate.accepted, self.batches_taken, self.admitted, self.trained)
        return Snapshot(*counts, dict(self.dropped), groups, shards, dict(self.told), dict(self.told_before))

    def check(self) -> None:
        """Raises ConservationError."""
        live = self.admitted - self.trained - sum(self.dropped.values())
        open_groups = len(self.groups) - self.settled
        trained_groups = (self.batches_taken - len(self.batches)) * self.gate.groups_per_step
        gate = (self.gate.running, self.gate.accepted)
        if live != self.buffered + open_groups * self.samples_per_group or gate != (
            open_groups,
            trained_groups + self.settled,
        ):
            raise ConservationError(
                f"samples were lost or counted twice: {self.counts()}; gate (running, accepted) = {gate}, groups open "
                f"{open_groups}, settled {self.settled}, trained {trained_groups}"
            )

    # --- records

    def _apply(self, record: LedgerRecord) -> None:
        match record:
            case Snapshot():
                self._open(record)
            case Assigned(position=position, shard=shard):
                self._assign(position, shard)
            case Booked(shard=shard, number=number, event=event):
                self.shards[shard].heard = number
                self._book(shard, event)
            case Joined(join=join):
                self._join(join)
            case Lost(shard=shard):
                self.shards[shard].lost = True
                for group in [one for one in self.groups.values() if one.shard == shard]:
                    self._take_from_shard(group)
            case Advanced(version=version):
                self.gate.advance(version)
            case Leased(step=step, positions=positions, dropped=dropped):
                self.batches[step] = list(positions)
                self.batches_taken = step
                self.told_before, self.told = self.told, Counter(dropped)
                for position in positions:
                    self.groups[position].step = step
            case GivenBack(step=step):
                self._give_back(step)
            case BatchEnded(step=step):
                self._end_batch(step)

    def _open(self, snapshot: Snapshot) -> None:
        self.cursor, self.batches_taken = snapshot.cursor, snapshot.batches_taken
        self.admitted, self.trained, self.dropped = snapshot.admitted, snapshot.trained, Counter(snapshot.dropped)
        self.told, self.told_before = Counter(snapshot.told), Counter(snapshot.told_before)
        self.groups = {one.position: msgspec.structs.replace(one) for one in snapshot.groups}
        self.shards = [msgspec.structs.replace(one, orders=list(one.orders)) for one in snapshot.shards]
        self.batches, self.homeless = {}, set()
        for group in self.groups.values():
            if group.step is not None:
                self.batches.setdefault(group.step, []).append(group.position)
            elif group.shard is None:
                self.homeless.add(group.position)
        settled = [one.settled for one in self.groups.values() if one.settled is not None]
        self.settled, self.buffered = len(settled), sum(len(one.samples) for one in settled)
        self.gate.version, self.gate.accepted = snapshot.version, snapshot.accepted
        self.gate.running = len(self.groups) - self.settled

    def _assign(self, position: int, shard: int) -> None:
        if position == self.cursor:
            self.gate.admit_again()  # as far as staleness goes: over-sampling is for whoever decides
            self.cursor += 1
            self.admitted += self.samples_per_group
            group = LedgerGroup(position, self.gate.version, shard)
        else:
            group = self.groups.pop(position)
            self.homeless.remove(position)
            group.version, group.shard = self.gate.version, shard
        # behind all others: to the rule of admission it is as one that was dropped, and another begun
        self.groups[position] = group
        self._order(shard, Make(position, self.gate.version))

    def _book(self, shard: int, event: Event) -> None:
        group = self.groups.get(event.position)
        if group is None or group.shard != shard or group.settled is not None:
            return  # it was told to forget what this speaks of, and had not read that yet
        if isinstance(event, Returned):
            self._take_from_shard(group)
        else:
            self._settle(group, event)

    def _join(self, join: ShardJoin) -> None:
        shard = self.shards[join.shard]
        shard.incarnation, shard.lost, shard.heard, shard.ordered = join.incarnation, False, 0, 0
        shard.orders = []
        for held in join.held:
            group = self.groups.get(held.position)
            # the same as it was taken for: nobody was told to begin it anew since
            free = group is not None and group.shard is None and group.version == held.version
            if group is not None and free and _is_of(group, held):
                group.shard = join.shard
                self.homeless.discard(group.position)
        by_position = {held.position: held for held in join.held}
        for group in [one for one in self.groups.values() if one.shard == join.shard]:
            found = by_position.get(group.position)
            if found is None or group.version != found.version or not _is_of(group, found):
                self._take_from_shard(group)
            elif group.settled is None and found.settled is not None:
                self._settle(group, found.settled)
        for held in join.held:
            known = self.groups.get(held.position)
            if known is None or known.shard != join.shard:
                self._order(join.shard, Void(held.position))

    def _give_back(self, step: int) -> None:
        self.told = self.told_before
        for position in self.batches.pop(step):
            group = self.groups[position]
            group.step = None
            if group.shard is None:
                self._take_from_shard(group)
        self.batches_taken = step - 1

    def _end_batch(self, step: int) -> None:
        by_shard: dict[int, list[int]] = {}
        for position in self.batches.pop(step):
            group = self.groups.pop(position)
            if group.settled is None:
                raise KeyError(position)
            self.settled -= 1
            self.buffered -= len(group.settled.samples)
            self.trained += len(group.settled.samples)
            if group.shard is not None:
                by_shard.setdefault(group.shard, []).append(position)
        for shard, positions in by_shard.items():
            self._order(shard, LetGo(step, positions))

    # --- groups

    def _settle(self, group: LedgerGroup, event: Settled) -> None:
        left, dropped = len(event.samples), sum(event.dropped.values())
        self.admitted += left + dropped - self.samples_per_group  # forked ones
        self.dropped.update(event.dropped)
        if event.samples:
            group.settled = event
            self.settled += 1
            self.buffered += left
            self.gate.accept()
        else:
            del self.groups[group.position]
            self.gate.drop()

    def _take_from_shard(self, group: LedgerGroup) -> None:
        """Its shard has nothing of it any more. One that is in a batch stays there: the trainer may have it."""
        group.shard = None
        if group.step is not None:
            return
        self.homeless.add(group.position)
        if (event := group.settled) is None:
            return
        left, dropped = len(event.samples), sum(event.dropped.values())
        group.settled = None
        self.admitted -= left + dropped - self.samples_per_group
        self.dropped.subtract(event.dropped)
        self.dropped = +self.dropped
        self.settled -= 1
        self.buffered -= left
        self.gate.reopen()

    def _order(self, shard: int, order: Order) -> None:
        books = self.shards[shard]
        books.ordered += 1
        books.orders.append(order)


def _is_of(group: LedgerGroup, held: Held) -> bool:
    """Is what a shard holds as far as the group is in the books, or farther?"""
    if group.settled is None:
        return True
    return held.settled is not None and held.settled.samples == group.settled.samples
