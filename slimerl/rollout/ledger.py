"""The admission ledger: one staleness gate and one set of books for several rollout processes. Pure.

Flows in: what shards report (`slimerl/samples/ledger_messages.py`), new policy versions, the trainer's wishes, the
time. Flows out: orders for shards, batches of whole groups, and to the log every decision.

A group goes to its shard (`slimerl/rollout/shares.py`) as soon as the gate admits it, or to the next one that has room
where its own is lost or has said that it has none; while that is not known, it waits. What a shard holds is leased to
it for as long as it reports: of one that fell silent the groups go to others, and it is not heard before it has joined
anew.

Invariants: a decision is noted before anybody learns of it, and whoever answers a shard or the trainer waits until that
is written; positions are admitted in order, each once; whatever is lost, repeated or late on the way, or which process
ends when, every sample that the trainer gets is trained once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slimerl.rollout.admission import GateError, StalenessGate, choose_batch
from slimerl.rollout.ledger_books import (
    Advanced,
    Assigned,
    BatchEnded,
    Booked,
    GivenBack,
    Joined,
    Leased,
    LedgerBooks,
    LedgerRecord,
    Lost,
    ShardBooks,
    Snapshot,
)
from slimerl.rollout.shares import shards_from
from slimerl.samples.books import Counts, StoreError
from slimerl.samples.ledger_messages import NO_ENGINE, LedgerReply, Make, Settled, ShardJoin, ShardReport
from slimerl.samples.messages import SampleMeta


class LedgerError(GateError):
    """What was said does not fit the books; the message says what stands there."""


class Fenced(LedgerError):
    """The shard's lease ran out, or a later incarnation of it has joined: it has to join with a higher number than
    `incarnation`."""

    def __init__(self, shard: int, given: int, incarnation: int) -> None:
        super().__init__(
            f"shard {shard} is not heard as incarnation {given}: the books have {incarnation}, and what it held may be "
            "made elsewhere; it joins again and tells what it holds"
        )
        self.given, self.incarnation = given, incarnation


@dataclass(frozen=True)
class LedgerBatch:
    """Whole groups in the order of their positions. `shards`: who holds each group, by its id."""

    step: int
    positions: tuple[int, ...]
    samples: tuple[SampleMeta, ...]
    shards: dict[str, int]
    notes: dict[str, bytes]
    """Of each group, by its id."""


def unheard(_: LedgerRecord) -> None:
    """The log of a ledger that keeps none."""


@dataclass
class AdmissionLedger:
    """See the module's docstring.

    Args of the constructor:
        books: empty, or as the log of an earlier process left them.
        lease_s: seconds from one report of a shard to the next, at most.
        started_s: the time now.
        patience_s: how long the shards have for their first report; default: `lease_s`.
    """

    books: LedgerBooks
    lease_s: float
    started_s: float
    patience_s: float | None = None
    note: Callable[[LedgerRecord], None] = unheard
    """Takes every record, before anybody learns of what it says."""
    _until_s: dict[int, float] = field(default_factory=dict)
    """When the lease of a shard ends; of those that are not lost."""
    _room: dict[int, int] = field(default_factory=dict)
    """Groups that a shard would take beside what it was given; of those that have reported since they joined, or since
    this process has begun. No other is given any: what it has still to tell may be of an earlier order for the same
    group, and its first report has all of that."""

    def __post_init__(self) -> None:
        patience_s = self.lease_s if self.patience_s is None else self.patience_s
        self._until_s = {
            number: self.started_s + patience_s for number, shard in enumerate(self.books.shards) if not shard.lost
        }

    # --- shards

    def join(self, join: ShardJoin, now_s: float) -> LedgerReply:
        """Take a shard in, with what it holds; told again it is the same.

        Raises:
            LedgerError: there is no such shard, or what it holds cannot be (Fenced: it is an older incarnation).
        """
        shard = self._shard(join.shard)
        known = join.incarnation == shard.incarnation and not shard.lost
        if not known:
            if join.incarnation <= shard.incarnation:
                raise Fenced(join.shard, join.incarnation, shard.incarnation)
            for held in join.held:
                if held.settled is not None:
                    self._check(join.shard, held.settled)
            self._record(Joined(join))
            self._room.pop(join.shard, None)
        self._until_s[join.shard] = now_s + self.lease_s
        self._hand_out()
        return self.reply(join.shard)

    def report(self, report: ShardReport, now_s: float) -> LedgerReply:
        """Book what is new of a shard's events, and renew its lease.

        Raises:
            LedgerError: an event that cannot be, or events before it are missing (Fenced: see there).
        """
        shard = self._shard(report.shard)
        if report.incarnation != shard.incarnation or shard.lost:
            raise Fenced(report.shard, report.incarnation, shard.incarnation)
        if report.first > shard.heard + 1:
            raise LedgerError(
                f"shard {report.shard} tells of events from {report.first} on, but only {shard.heard} are in the books"
            )
        if report.seen > shard.ordered:
            raise LedgerError(
                f"shard {report.shard} knows of {report.seen} orders, and the books of {shard.ordered}: part of the "
                "log is missing; start the run again, it goes on from its newest checkpoint"
            )
        for number, event in enumerate(report.events, report.first):
            if number > shard.heard:
                if isinstance(event, Settled):
                    self._check(report.shard, event)
                self._record(Booked(report.shard, number, event))
        unseen = shard.ordered - report.seen
        if unseen <= len(shard.orders):
            # otherwise a later report has overtaken this one, and knows more
            del shard.orders[: len(shard.orders) - unseen]
            self._room[report.shard] = report.room - sum(isinstance(order, Make) for order in shard.orders)
        self._until_s[report.shard] = now_s + self.lease_s
        self._hand_out()
        return self.reply(report.shard)

    def expire(self, now_s: float) -> list[int]:
        """End the leases that have run out; returns whose. To be called from time to time."""
        lost = [shard for shard, until_s in self._until_s.items() if until_s <= now_s]
        for shard in lost:
            self._record(Lost(shard))
            del self._until_s[shard]
            self._room.pop(shard, None)
        if lost:
            self._hand_out()
        return lost

    @property
    def awaited(self) -> list[int]:
        """Shards that have not reported to this process yet, and may."""
        return sorted(self._until_s.keys() - self._room.keys())

    # --- the trainer

    def advance(self, version: int) -> None:
        """Engines serve `version`. Raises GateError: it is older than the present one."""
        if version != self.books.gate.version:
            self._record(Advanced(version))
        self._hand_out()

    def take_batch(self, step: int) -> LedgerBatch | None:
        """The batch of `step`; None while it is not complete. Asked again it is the same batch, unless a shard has lost
        some of it meanwhile: then it is made up anew.

        Raises:
            StoreError: it was trained already.
            LedgerError: it is not the next one, or behind the last step of the run.
        """
        books = self.books
        if step in books.batches:
            if all(books.groups[position].shard is not None for position in books.batches[step]):
                return self._batch(step)
            self.give_back(step)
        if step <= books.batches_taken:
            raise StoreError(f"batch {step} was trained already")
        if step != books.batches_taken + 1 or step > books.gate.steps:
            raise LedgerError(f"batch {step} is not the next: {books.batches_taken} of {books.gate.steps} are taken")
        gate = books.gate
        if books.ready() < gate.groups_per_step:
            return None
        chosen = choose_batch(books.views(), books.batches_taken, gate.groups_per_step, gate.max_staleness)
        if chosen is None:
            return None
        self._record(Leased(step, sorted(map(int, chosen)), dict(books.dropped)))
        self._hand_out()
        return self._batch(step)

    def give_back(self, step: int) -> None:
        """End a lease without training: its groups are ready again. Raises LedgerError: it is not the newest batch."""
        if step not in self.books.batches or step != self.books.batches_taken:
            raise LedgerError(f"batch {step} is not the newest that is out: {sorted(self.books.batches) or 'none'}")
        self._record(GivenBack(step))
        self._hand_out()

    def trained(self, step: int) -> None:
        """The batch has been trained; a repeated acknowledgment changes nothing. Raises LedgerError: it is not out."""
        if step not in self.books.batches:
            if 0 < step <= self.books.batches_taken:
                return
            raise LedgerError(f"batch {step} is not out; out: {sorted(self.books.batches) or 'none'}")
        self._record(BatchEnded(step))
        self._hand_out()

    def restore(self, snapshot: Snapshot) -> None:
        """Begin with the books of an earlier run; told again before anything was trained it is the same.

        Raises:
            StoreError: other groups were admitted already.
        """
        books = self.books
        if books.cursor:
            known = {group.position for group in snapshot.groups} <= books.groups.keys() and not books.batches
            if known and (books.batches_taken, books.trained) == (snapshot.batches_taken, snapshot.trained):
                return
            raise StoreError(f"{books.cursor} groups were admitted already; books are taken over before the first")
        self._record(snapshot)
        self._hand_out()

    def counts(self) -> Counts:
        return self.books.counts()

    # --- handing out

    def _hand_out(self) -> None:
        """Give groups to shards: those that have none, then new ones as far as the gate admits."""
        books, gate = self.books, self.books.gate
        for position in sorted(books.homeless):
            # it may be one without which no batch can be made up
            shard = self._place(position, is_urgent=True)
            if shard is not None:
                self._give(position, shard)
        while gate.may_admit():
            shard = self._place(books.cursor, is_urgent=gate.next_batch <= books.batches_taken)
            if shard is None:
                return
            self._give(books.cursor, shard)

    def _place(self, position: int, is_urgent: bool) -> int | None:
        """The shard for a group; None: nobody has room for it, or that is not known yet."""
        full = None
        for shard in shards_from(position, len(self.books.shards)):
            if shard not in self._until_s:
                continue
            if shard not in self._room:
                return None
            if self._room[shard] > 0:
                return shard
            if full is None and self._room[shard] > NO_ENGINE // 2:
                full = shard
        return full if is_urgent else None

    def _give(self, position: int, shard: int) -> None:
        self._record(Assigned(position, shard))
        self._room[shard] -= 1

    # --- the books

    def _record(self, record: LedgerRecord) -> None:
        self.note(record)
        self.books.apply([record])

    def _shard(self, number: int) -> ShardBooks:
        if not 0 <= number < len(self.books.shards):
            raise LedgerError(f"there is no shard {number}, but {len(self.books.shards)}, from 0 on")
        return self.books.shards[number]

    def _check(self, shard: int, event: Settled) -> None:
        """Raises LedgerError: these cannot be the samples of a group that is settled."""
        names = {meta.sample_id for meta in event.samples}
        groups = {meta.group_id for meta in event.samples}
        count = len(event.samples) + sum(event.dropped.values())
        too_few = count < self.books.samples_per_group or min(event.dropped.values(), default=1) < 1
        if too_few or len(names) < len(event.samples) or len(groups) > 1:
            raise LedgerError(
                f"shard {shard}: the group at {event.position} is not settled by {sorted(names)} of {sorted(groups)} "
                f"and {event.dropped} dropped; it has {self.books.samples_per_group} samples at least"
            )

    def reply(self, number: int) -> LedgerReply:
        """What a shard is told now."""
        shard = self.books.shards[number]
        first = shard.ordered - len(shard.orders) + 1
        return LedgerReply(shard.incarnation, shard.heard, self.lease_s, first, list(shard.orders))

    def _batch(self, step: int) -> LedgerBatch:
        positions = sorted(self.books.batches[step])
        samples: list[SampleMeta] = []
        shards: dict[str, int] = {}
        notes: dict[str, bytes] = {}
        for group in map(self.books.groups.__getitem__, positions):
            if group.settled is not None and group.shard is not None:
                samples += group.settled.samples
                name = group.settled.samples[0].group_id
                shards[name], notes[name] = group.shard, group.settled.notes
        return LedgerBatch(step, tuple(positions), tuple(samples), shards, notes)


def replayed(records: Iterable[LedgerRecord], gate: StalenessGate, samples_per_group: int, shards: int) -> LedgerBooks:
    """The books as the records of earlier processes leave them.

    Args:
        gate: as it is before the first record.
    """
    books = LedgerBooks(gate, samples_per_group, [ShardBooks() for _ in range(shards)])
    books.apply(records)
    return books
