"""One admission ledger over several rollout processes, through any history: each sample is trained once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_scene import GROUPS, LEASE_S, PLENTY, SIZE, empty_ledger, gate, outcome, over_the_wire

from slimerl.rollout.ledger import AdmissionLedger, Fenced, LedgerBatch, replayed
from slimerl.rollout.ledger_books import (
    Assigned,
    BatchEnded,
    Booked,
    GivenBack,
    Joined,
    Leased,
    LedgerRecord,
    Lost,
)
from slimerl.rollout.shard_link import ShardLink
from slimerl.samples.books import StoreError
from slimerl.samples.journal import frame, read_frames
from slimerl.samples.ledger_messages import NO_ENGINE, Held, LedgerReply, Returned, Settled, ShardJoin
from slimerl.samples.messages import SampleMeta


def durable(records: list[LedgerRecord]) -> list[LedgerRecord]:
    """As a file gives them back."""
    return list(read_frames(b"".join(map(frame, records)), "log", LedgerRecord))


@dataclass
class _Told:
    """Of a group, by the records alone."""

    owner: int | None
    version: int
    outcome: Settled | None = None
    step: int | None = None
    trained: bool = False

    @property
    def lives(self) -> bool:
        return not self.trained and (self.outcome is None or bool(self.outcome.samples))

    def forget(self) -> None:
        self.owner = None
        if self.step is None:
            self.outcome = None


@dataclass
class BruteForce:
    """Reads the whole log again each time; keeps no counter."""

    groups: dict[int, _Told] = field(default_factory=dict)
    version: int = -1

    def read(self, records: list[LedgerRecord]) -> "BruteForce":
        for record in records:
            self._read(record)
        return self

    def _read(self, record: LedgerRecord) -> None:
        match record:
            case Assigned(position=position, shard=shard):
                self.groups[position] = _Told(shard, self.version)
            case Booked(shard=shard, event=event):
                group = self.groups.get(event.position)
                if group is not None and group.lives and group.owner == shard and group.outcome is None:
                    if isinstance(event, Returned):
                        group.forget()
                    else:
                        group.outcome = event
            case Joined(join=join):
                self._join(join)
            case Lost(shard=shard):
                for group in self.groups.values():
                    if group.lives and group.owner == shard:
                        group.forget()
            case Leased(step=step, positions=positions):
                for position in positions:
                    self.groups[position].step = step
            case GivenBack(step=step):
                for group in self._of(step):
                    group.step = None
                    if group.owner is None:
                        group.forget()
            case BatchEnded(step=step):
                for group in self._of(step):
                    group.trained = True
            case _:
                self.version = record.version

    def _of(self, step: int) -> list[_Told]:
        return [group for group in self.groups.values() if group.step == step]

    def _join(self, join: ShardJoin) -> None:
        held = {one.position: one for one in join.held}
        for position, group in self.groups.items():
            if not group.lives or group.owner not in (None, join.shard):
                continue
            found = held.get(position)
            done = found.settled.samples if found is not None and found.settled is not None else None
            known = group.outcome.samples if group.outcome is not None else done
            if found is not None and found.version == group.version and done == known:
                group.owner, group.outcome = join.shard, group.outcome or found.settled
            elif group.owner == join.shard:
                group.forget()

    def counts(self) -> dict[str, Any]:
        outcomes = [group.outcome for group in self.groups.values() if group.outcome is not None]
        dropped = sum((Counter(one.dropped) for one in outcomes), Counter())
        of_outcomes = sum(len(one.samples) + sum(one.dropped.values()) for one in outcomes)
        running = SIZE * (len(self.groups) - len(outcomes))
        trained = sum(len(group.outcome.samples) for group in self.groups.values() if group.trained)
        buffered = sum(len(one.samples) for one in outcomes) - trained
        return {
            "admitted": of_outcomes + running,
            "running": running,
            "buffered": buffered,
            "trained": trained,
            "dropped": dropped,
        }


class Cluster(RuleBasedStateMachine):
    """Three shards, a ledger, a trainer; a network that loses, repeats and overtakes; processes that end anywhere."""

    SHARDS = 3

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.links: list[ShardLink | None] = [ShardLink(number, 1) for number in range(self.SHARDS)]
        self.kept: list[tuple[int, list[Held]]] = [(1, [])] * self.SHARDS
        """Of a shard that ended: its incarnation, and what its journal has."""
        self.wire: list[Any] = []
        self.history: list[LedgerRecord] = []
        """All that was ever written, without snapshots."""
        self.log: list[LedgerRecord] = []
        self.pending: list[LedgerRecord] = []
        self.out: LedgerBatch | None = None
        """What the trainer has fetched."""
        self.trained: list[SampleMeta] = []
        self.steps_done = 0

    @initialize(staleness=st.integers(0, 2))
    def begin(self, staleness: int) -> None:
        self.staleness = staleness
        self.ledger = empty_ledger(self.SHARDS, staleness, note=self.pending.append)
        self.call(lambda: self.ledger.advance(0))
        self.all_is_well(kind=3)

    # --- the ledger

    def call(self, act: Callable[[], Any], cut: int | None = None) -> Any:
        """What it answers; None where it ended before it could. `cut`: how many of its records are written then."""
        try:
            answer = act()
        finally:
            pending, self.pending[:] = list(self.pending), []
            written = pending if cut is None else pending[:cut]
            self.history += written
            self.log += written
        if cut is not None:
            self.start_ledger()
            return None
        return answer

    def start_ledger(self) -> None:
        books = replayed(durable(self.log), gate(self.staleness), SIZE, self.SHARDS)
        self.ledger = AdmissionLedger(books, LEASE_S, self.now_s, note=self.pending.append)

    @rule(shorten=st.booleans())
    def the_ledger_starts_again(self, shorten: bool) -> None:
        before, orders = self.ledger.counts(), [shard.orders for shard in self.ledger.books.shards]
        if shorten:
            self.log = [self.ledger.books.snapshot()]
        self.start_ledger()
        assert self.ledger.counts() == before
        for mine, known in zip(self.ledger.books.shards, orders, strict=True):
            assert mine.orders[len(mine.orders) - len(known) :] == known

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.call(lambda: self.ledger.expire(self.now_s))

    # --- the network

    @rule(
        shard=st.integers(0, SHARDS - 1),
        room=st.sampled_from([NO_ENGINE, 0, 1, PLENTY, PLENTY]),
        fate=st.sampled_from(["heard", "heard", "heard", "late", "reply late", "repeated"]),
        cut=st.sampled_from([None, None, None, None, 0, 1, 2]),
    )
    def a_shard_speaks(self, shard: int, room: int, fate: str, cut: int | None) -> None:
        link = self.links[shard]
        if link is None:
            return
        message = link.report(room) if link.joined else link.join()
        if fate in ("late", "repeated"):
            self.wire.append(message)
        if fate == "late":
            return
        before = len(self.wire)
        self.arrive(message, cut)
        if fate != "reply late" and len(self.wire) > before:
            self.arrive(self.wire.pop())

    @rule(kind=st.integers(0, 3))
    def all_is_well(self, kind: int) -> None:
        """For once."""
        for shard in range(self.SHARDS):
            for _ in range(2):
                self.a_shard_speaks(shard, PLENTY, "heard", None)
            while self.open_positions(shard):
                self.a_group_is_settled(shard, 0, kind)

    @rule(which=st.integers(0, 50), again=st.booleans(), cut=st.sampled_from([None, None, None, 0, 1, 2]))
    @precondition(lambda self: self.wire)
    def a_message_arrives(self, which: int, again: bool, cut: int | None) -> None:
        place = which % len(self.wire)
        message = self.wire[place] if again else self.wire.pop(place)
        self.arrive(message, cut)

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: self.wire)
    def a_message_is_lost(self, which: int) -> None:
        self.wire.pop(which % len(self.wire))

    def arrive(self, message: Any, cut: int | None = None) -> None:
        shard, what = message if isinstance(message, tuple) else (message.shard, message)
        link = self.links[shard]
        match what:
            case Fenced():
                if link is not None:
                    link.fenced(what.given, what.incarnation)
            case LedgerReply():
                if link is not None:
                    link.take(over_the_wire(what, LedgerReply))
            case _:
                heard = over_the_wire(what, type(what))
                ask = self.ledger.join if isinstance(heard, ShardJoin) else self.ledger.report
                try:
                    reply = self.call(lambda: ask(heard, self.now_s), cut)
                except Fenced as error:
                    reply = error
                if reply is not None:
                    self.wire.append((shard, reply))

    # --- shards

    def open_positions(self, shard: int) -> list[int]:
        link = self.links[shard]
        held = link.held.values() if link is not None else ()
        return sorted(one.position for one in held if one.settled is None)

    @rule(shard=st.integers(0, SHARDS - 1), which=st.integers(0, 9), kind=st.integers(0, 3))
    def a_group_is_settled(self, shard: int, which: int, kind: int) -> None:
        if positions := self.open_positions(shard):
            position = positions[which % len(positions)]
            self.links[shard].settled(outcome(position, self.links[shard].held[position].version, kind))

    @rule(shard=st.integers(0, SHARDS - 1), which=st.integers(0, 9))
    def a_group_is_returned(self, shard: int, which: int) -> None:
        if positions := self.open_positions(shard):
            self.links[shard].returned(positions[which % len(positions)])

    @rule(shard=st.integers(0, SHARDS - 1), keeps=st.booleans())
    def a_shard_ends(self, shard: int, keeps: bool) -> None:
        if (link := self.links[shard]) is not None:
            self.kept[shard] = (link.incarnation, list(link.held.values()) if keeps else [])
            self.links[shard] = None

    @rule(shard=st.integers(0, SHARDS - 1))
    def a_shard_starts(self, shard: int) -> None:
        if self.links[shard] is None:
            incarnation, held = self.kept[shard]
            self.links[shard] = ShardLink(shard, incarnation + 1)
            self.links[shard].hold(held)

    # --- the trainer

    @rule()
    def the_trainer_takes(self) -> None:
        """Also again, as one that has started anew."""
        try:
            batch = self.call(lambda: self.ledger.take_batch(self.steps_done + 1))
        except StoreError:
            return  # it has trained, and was not heard to say so
        self.out = batch if batch is not None and self.fetched(batch) else None

    @rule(cut=st.sampled_from([None, None, 0, 1]))
    @precondition(lambda self: self.out)
    def the_trainer_trains(self, cut: int | None) -> None:
        batch = self.out
        if self.call(lambda: self.ledger.trained(batch.step) or True, cut) is None:
            return  # it says so again
        self.trained += batch.samples
        assert batch.step - 1 - min(each.oldest_version for each in batch.samples) <= self.staleness, "test A1"
        assert len({each.group_id for each in batch.samples}) == GROUPS
        self.steps_done, self.out = batch.step, None
        self.call(lambda: self.ledger.advance(batch.step))

    def fetched(self, batch: LedgerBatch) -> bool:
        """Does every shard that the manifest names have what it says? One that has ended does not answer."""
        samples: list[SampleMeta] = []
        for position in batch.positions:
            link = self.links[batch.shards[str(position)]]
            if link is None or position not in link.held:
                return False
            samples += link.held[position].settled.samples
        assert tuple(samples) == batch.samples
        return True

    # --- what holds

    @invariant()
    def the_books_are_those_of_a_reader_who_reads_the_whole_log(self) -> None:
        if not hasattr(self, "ledger"):
            return
        told = BruteForce().read(self.history)
        assert vars(self.ledger.counts()) == told.counts()
        assert sorted(told.groups) == list(range(self.ledger.books.cursor)), "positions are admitted in order"
        ids = [each.sample_id for each in self.trained]
        assert len(ids) == len(set(ids)), "no sample is trained twice"
        live = sum(group.lives or group.trained for group in told.groups.values())
        assert live <= (self.staleness + told.version + 1) * GROUPS, "test A1: the gate"

    def teardown(self) -> None:
        """Once everything works again the run goes on, and what shards hold is what the ledger says."""
        if not hasattr(self, "ledger"):
            return
        target = self.steps_done + 3
        self.call(lambda: self.ledger.advance(self.steps_done))
        for _ in range(60):
            for shard in range(self.SHARDS):
                self.a_shard_starts(shard)
                while self.wire:
                    self.arrive(self.wire.pop(0))
                for _ in range(3):
                    self.a_shard_speaks(shard, PLENTY, "heard", None)
            if self.steps_done >= target:
                break
            self.all_is_well(0)
            self.the_trainer_takes()
            if self.out is not None:
                self.the_trainer_trains(None)
        assert self.steps_done >= target, "the run stands still"
        held = {position: link.shard for link in self.links for position in link.held}
        assert held == {one.position: one.shard for one in self.ledger.books.groups.values()}
        assert sum(len(link.held) for link in self.links) == len(held), "no group is at two shards"
        assert len(self.trained) == self.ledger.counts().trained


test_a2_each_sample_is_trained_once_through_any_history = Cluster.TestCase
test_a2_each_sample_is_trained_once_through_any_history.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
