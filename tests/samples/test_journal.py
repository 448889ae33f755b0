"""What a process that ended held stands in its journal: nothing is lost, nothing counts twice, wherever it was cut."""

from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from slimerl.samples.books import StoreError
from slimerl.samples.journal import (
    Admitted,
    Books,
    Dropped,
    HandedOut,
    JournalDamaged,
    Record,
    Recovered,
    Replay,
    Trained,
    frame,
    read_frames,
)
from slimerl.samples.messages import RolloutState
from slimerl.samples.sample import Sample
from slimerl.samples.store import SampleStore

START = Books(0, 0, 0, {}, {})
Segments = list[list[Record]]


class Journaled:
    """A store whose records are kept in segments; `moves` drives it from numbers that hypothesis draws."""

    def __init__(self) -> None:
        self.segments: Segments = [[START]]
        self.store = SampleStore(smallest_group=2, note=lambda record: self.segments[-1].append(record))
        self.drawn = self.steps = 0
        self.batches: dict[str, set[str]] = {}

    def books(self) -> Books:
        counts, leases = self.store.counts(), self.store.leases()
        return Books(
            *(self.steps, self.drawn, counts.trained, counts.dropped, {}, self.store.booked_groups(), leases),
            [HandedOut(lease.batch_id, 1, {}, {}) for lease in leases],
        )

    def move(self, what: int, which: int) -> None:
        """One transition, if there is one of that kind to make."""
        moves: list[Callable[[int], None]] = [self.admit, self.work, self.work, self.work, self.drop, self.consume]
        moves[what % len(moves)](which)

    def admit(self, which: int) -> None:
        group_id = f"0/{self.drawn}"
        self.drawn += 1
        samples = [Sample(f"{group_id}/{number}", group_id, group_id[2:], (which,)) for number in range(2 + which % 2)]
        self.store.admit(group_id, samples, version=self.steps)

    def live(self) -> list[Sample]:
        """Not finished."""
        found = [one for group in self.store._groups.values() for one in group.samples.values()]
        return [one for one in found if isinstance(one, Sample)]

    def work(self, which: int) -> None:
        if not (live := self.live()):
            return
        sample = live[which % len(live)]
        self.store.start(sample.sample_id)
        sample.append([which] * (1 + which % 3), [-0.5] * (1 + which % 3), self.steps)
        if which % 4 == 0:
            self.store.interrupt(sample.sample_id)
            return
        self.store.generated(sample.sample_id)
        sample.reward, sample.correct, sample.finish_reason = float(which % 2), bool(which % 2), "stop"
        self.store.rewarded(sample.sample_id)

    def drop(self, which: int) -> None:
        if live := self.live():
            self.store.drop(live[which % len(live)].sample_id, ("timeout", "refused")[which % 2])

    def consume(self, which: int) -> None:
        """Lease what is ready, or end the lease."""
        if leases := self.store.leases():
            if which % 3:
                self.store.trained(leases[0].batch_id)
                self.steps += 1
            else:
                self.store.give_back(leases[0].batch_id)
        elif ready := [group.group_id for group in self.store.unleased() if group.ready]:
            batch_id = f"step-{self.steps + 1}"
            batch = self.store.lease(batch_id, ready[: 1 + which % 2])
            self.batches[batch_id] = {meta.sample_id for meta in batch.samples}
            self.segments[-1].append(HandedOut(batch_id, self.steps + 1, {"x": 1.0}, {}))


def replayed(segments: Segments) -> Recovered:
    replay = Replay()
    for number, records in enumerate(segments):
        replay.apply(read_frames(b"".join(map(frame, records)), f"segment {number}"))
    found = replay.result()
    assert found is not None
    return found


def expected(made: Journaled) -> RolloutState:
    """By the store itself; partial samples as far as they were journaled are compared apart."""
    counts = made.store.counts()
    # `saved_groups` refuses while a batch is leased, which the journal must cope with
    batches, made.store._batches = made.store._batches, {}
    groups = [msgspec.structs.replace(group, begun=[]) for group in made.store.saved_groups()]
    made.store._batches = batches
    return RolloutState(made.steps, made.drawn, counts.trained, counts.dropped, {}, groups)


def without_begun(state: RolloutState) -> RolloutState:
    return msgspec.structs.replace(state, groups=[msgspec.structs.replace(one, begun=[]) for one in state.groups])


MOVES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(MOVES, st.integers(1, 9))
def test_a2_whatever_happened_the_journal_tells_what_the_store_holds(moves, segment_moves):
    made = Journaled()
    for number, move in enumerate(moves):
        made.move(*move)
        if number % segment_moves == segment_moves - 1:
            made.segments.append([made.books()])
        found = replayed(made.segments)
        assert without_begun(found.state) == expected(made)
        assert found.leases == made.store.leases()
        held = {sample.sample_id: sample for sample in made.live()}
        for group in found.state.groups:
            for begun in group.begun:
                whole = held[begun.payload.sample_id].payload()
                assert whole.tokens.startswith(begun.payload.tokens), "a partial sample is a prefix of what there was"


@settings(max_examples=40, deadline=None)
@given(MOVES, st.data())
def test_c1_a_journal_cut_at_any_byte_tells_of_some_moment_before_and_each_sample_is_trained_once(moves, data):
    """Injected: the process is killed in the middle of a write; another takes over and goes on."""
    made = Journaled()
    for move in moves:
        made.move(*move)
    whole = b"".join(map(frame, made.segments[0]))
    first = len(frame(START))
    cut = data.draw(st.integers(first, len(whole)))
    replay = Replay()
    replay.apply(read_frames(whole[:cut], "cut"))
    found = replay.result()
    store = SampleStore(smallest_group=2)
    state = found.state
    store.restore(state.trained, state.dropped, [f"step-{step + 1}" for step in range(state.steps)])
    for group in state.groups:
        begun = {each.payload.sample_id: Sample.restored(each, group.group_id) for each in group.begun}
        missing = [begun.get(one) or Sample(one, group.group_id, "p", (1,)) for one in group.missing]
        store.admit_saved(group, missing)
    for lease in found.leases:
        store.lease(lease.batch_id, lease.group_ids)
    store.check()
    told = [one.batch_id for one in read_frames(whole[:cut], "cut") if isinstance(one, Trained)]
    trained = {sample_id for batch_id in told for sample_id in made.batches[batch_id]}
    assert state.trained == len(trained), "what was trained stays so"
    assert not trained & store._states.keys(), "and is not there again"
    for step in range(state.steps):
        with pytest.raises(StoreError, match="trained already"):
            store.batch(f"step-{step + 1}")


def test_a_frame_that_is_not_as_it_was_written_is_an_error_and_no_smaller_store():
    made = Journaled()
    for number in range(3):
        made.admit(number)
    data = bytearray(b"".join(map(frame, made.segments[0])))
    at = data.index(b"0/1/0")
    data[at : at + 5] = b"0/1/7"  # still a record, of another sample
    with pytest.raises(JournalDamaged, match=r"damaged: the frame at byte \d+ is not as it was written.*start the run"):
        Replay().apply(read_frames(bytes(data), "damaged"))


def test_no_bit_of_a_journal_can_change_and_make_it_a_smaller_store():
    """Injected: each bit flipped in turn; that of a length would say that the rest had not been written."""
    data = b"".join(map(frame, [START, Admitted("0/a", 0, ["0/a/0", "0/a/1"]), Dropped("0/a", "0/a/1", "timeout")]))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalDamaged):
            list(read_frames(bytes(changed), "damaged"))


def test_a_payload_that_is_in_no_segment_any_more_is_missed():
    made = Journaled()
    made.admit(0)
    made.work(1)
    made.segments.append([made.books()])
    with pytest.raises(JournalDamaged, match="the payloads of 1 samples are in no segment: 0/0/1"):
        replayed(made.segments[1:])


def test_a_segment_without_books_before_it_is_refused():
    made = Journaled()
    made.admit(0)
    with pytest.raises(JournalDamaged, match="does not begin with its books, but with Admitted"):
        replayed([made.segments[0][1:]])


def test_an_interrupted_sample_is_written_again_only_once_it_has_grown_by_half():
    made = Journaled()
    made.admit(0)
    sample = made.live()[0]
    for _ in range(64):
        made.store.start(sample.sample_id)
        sample.append([1] * 8, [-0.5] * 8, 0)
        made.store.interrupt(sample.sample_id)
    written = sum(len(frame(record)) for record in made.segments[0][2:])
    assert len(sample.payload().tokens) < written < 4 * sample.payload().size
