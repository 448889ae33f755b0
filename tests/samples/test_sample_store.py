"""The sample store: every sample ends exactly once, the books always balance, batches are whole groups in order."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slimerl.samples.messages import unpack_array
from slimerl.samples.sample import Sample, SampleState
from slimerl.samples.store import GROUP_TOO_SMALL, ConservationError, GroupState, SampleStore, StoreError


def group_of(count: int, group_id: str = "g") -> list[Sample]:
    return [Sample(f"{group_id}/{number}", group_id, "prompt", (1, 2)) for number in range(count)]


def admitted(store: SampleStore, count: int = 2, group_id: str = "g", version: int = 0) -> list[str]:
    samples = group_of(count, group_id)
    store.admit(group_id, samples, version)
    return [sample.sample_id for sample in samples]


def finish(store: SampleStore, sample_id: str) -> GroupState:
    """From queued to rewarded."""
    store.start(sample_id)
    sample = store.sample(sample_id)
    sample.append([7, 8], logprobs=[-0.5, -0.25], version=3)
    sample.finish_reason, sample.reward, sample.correct = "stop", 1.0, True
    store.generated(sample_id)
    return store.rewarded(sample_id)


def test_a_group_is_ready_when_its_last_sample_is_rewarded():
    store = SampleStore(smallest_group=2)
    first, second = admitted(store)
    assert finish(store, first) is GroupState.OPEN
    assert store.state(first) is SampleState.REWARDED
    assert finish(store, second) is GroupState.READY
    assert store.state(first) is SampleState.READY


def test_a_group_that_lost_samples_goes_on_with_the_rest():
    store = SampleStore(smallest_group=2)
    first, second, third = admitted(store, 3)
    finish(store, first)
    store.drop(second, "timeout")
    assert finish(store, third) is GroupState.READY
    batch = store.lease("b", ["g"])
    assert [meta.sample_id for meta in batch.samples] == [first, third]


def test_a_group_with_too_few_samples_left_is_dropped_as_a_whole():
    store = SampleStore(smallest_group=2)
    first, second = admitted(store)
    assert store.drop(second, "timeout") is GroupState.OPEN
    assert finish(store, first) is GroupState.DROPPED
    assert store.counts().dropped == {"timeout": 1, GROUP_TOO_SMALL: 1}
    assert store.unleased() == []


def test_the_manifest_keeps_admission_order_whatever_finishes_first():
    store = SampleStore()
    for group_id in ("a", "b", "c"):
        admitted(store, 2, group_id)
    for sample_id in ("c/1", "a/1", "c/0", "b/0", "b/1", "a/0"):
        finish(store, sample_id)
    batch = store.lease("batch", ["c", "a"])
    assert batch.group_ids == ("a", "c")
    assert [meta.sample_id for meta in batch.samples] == ["a/0", "a/1", "c/0", "c/1"]
    assert [group.group_id for group in store.unleased()] == ["b"]


def test_payloads_are_looked_up_by_id_in_the_order_asked_for():
    store = SampleStore()
    for sample_id in admitted(store):
        finish(store, sample_id)
    second, first = store.payloads(["g/1", "g/0"])
    assert (second.sample_id, first.sample_id) == ("g/1", "g/0")
    assert unpack_array(first.tokens, "int32").tolist() == [1, 2, 7, 8]
    assert unpack_array(first.versions, "int32").tolist() == [3, 3]


def test_payloads_of_unready_samples_are_refused_naming_each():
    store = SampleStore()
    admitted(store)
    with pytest.raises(StoreError, match="g/0, nowhere"):
        store.payloads(["g/0", "nowhere"])


def test_a_leased_batch_stays_the_same_until_it_is_trained_or_given_back():
    store = SampleStore()
    for sample_id in admitted(store):
        finish(store, sample_id)
    batch = store.lease("b", ["g"])
    assert store.batch("b") == batch
    with pytest.raises(StoreError, match="leased in batch b"):
        store.drop("g/0", "late")
    with pytest.raises(StoreError, match="leased in batch b"):
        store.lease("other", ["g"])
    store.give_back("b")
    assert store.batch("b") is None
    assert store.lease("other", ["g"]).samples == batch.samples


def test_a_trained_batch_is_forgotten_and_counted_once():
    store = SampleStore()
    for sample_id in admitted(store):
        finish(store, sample_id)
    store.lease("b", ["g"])
    store.trained("b")
    store.trained("b")
    assert store.counts().trained == 2
    with pytest.raises(StoreError, match="g/0 is not live"):
        store.sample("g/0")
    with pytest.raises(StoreError, match="b was trained already"):
        store.batch("b")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda store: store.admit("g", group_of(2), 0), "group g is live already"),
        (lambda store: store.admit("h", group_of(1), 0), "g/0 belongs to group g, not to h"),
        (lambda store: store.admit("h", [], 0), "group h: a group needs at least one"),
        (lambda store: store.admit("h", group_of(1, "h") * 2, 0), "h/0 is live already"),
        (lambda store: store.start("g/9"), "g/9 is not live"),
        (lambda store: store.generated("g/0"), "g/0: generated, but it holds no response tokens"),
        (lambda store: store.rewarded("g/0"), "g/0: rewarded, but its reward is not set"),
        (lambda store: store.interrupt("g/0"), "g/0 is queued and cannot become interrupted"),
        (lambda store: store.trained("b"), "b is not leased; leased: none"),
        (lambda store: store.lease("b", ["g"]), "group g is open"),
        (lambda store: store.lease("b", ["x"]), "not in the store.*'x'"),
    ],
)
def test_what_the_life_cycle_forbids_is_refused_by_name_and_changes_nothing(act, message):
    store = SampleStore()
    admitted(store)
    with pytest.raises(StoreError, match=message):
        act(store)
    assert store.counts() == store.counts().__class__(2, 2, 0, 0, {})
    assert store.state("g/0") is SampleState.QUEUED


def test_a2_a_sample_that_vanishes_from_the_books_is_noticed():
    """Fault: a sample is forgotten without a terminal state."""
    store = SampleStore()
    admitted(store)
    del store._states["g/0"]
    with pytest.raises(ConservationError):
        store.check()


class Lives(RuleBasedStateMachine):
    """Test A2: random lives of random groups against books kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SampleStore(smallest_group=2)
        self.made = 0
        self.alive: dict[str, SampleState] = {}
        self.ended: Counter[str] = Counter()
        self.batches: dict[str, list[str]] = {}

    def in_state(self, *states: SampleState) -> list[str]:
        return sorted(one for one, state in self.alive.items() if state in states)

    def follow(self) -> None:
        """Take over what the store did to whole groups; nothing may leave but by a drop."""
        for one in list(self.alive):
            try:
                self.alive[one] = self.store.state(one)
            except StoreError:
                del self.alive[one]
                self.ended[one] += 1

    @rule(size=st.integers(1, 4))
    def admit(self, size: int) -> None:
        group_id = f"g{self.made}"
        self.made += 1
        for one in admitted(self.store, size, group_id):
            self.alive[one] = SampleState.QUEUED

    @rule(data=st.data())
    @precondition(lambda self: self.in_state(SampleState.QUEUED, SampleState.INTERRUPTED))
    def start(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.in_state(SampleState.QUEUED, SampleState.INTERRUPTED)))
        self.store.start(one)
        self.follow()

    @rule(data=st.data())
    @precondition(lambda self: self.in_state(SampleState.RUNNING))
    def interrupt(self, data: st.DataObject) -> None:
        self.store.interrupt(data.draw(st.sampled_from(self.in_state(SampleState.RUNNING))))
        self.follow()

    @rule(data=st.data())
    @precondition(lambda self: self.in_state(SampleState.RUNNING))
    def generate(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.in_state(SampleState.RUNNING)))
        self.store.sample(one).append([5], logprobs=[-1.0], version=0)
        self.store.generated(one)
        self.follow()

    @rule(data=st.data())
    @precondition(lambda self: self.in_state(SampleState.GENERATED))
    def reward(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.in_state(SampleState.GENERATED)))
        self.store.sample(one).reward = 0.0
        self.store.rewarded(one)
        self.follow()

    @rule(data=st.data())
    @precondition(lambda self: self.droppable())
    def drop(self, data: st.DataObject) -> None:
        self.store.drop(data.draw(st.sampled_from(self.droppable())), "chance")
        self.follow()

    def droppable(self) -> list[str]:
        leased = {one for ids in self.batches.values() for one in ids}
        return sorted(set(self.alive) - leased)

    @rule(count=st.integers(1, 3))
    def lease(self, count: int) -> None:
        ready = [group.group_id for group in self.store.unleased() if group.ready][:count]
        batch_id = f"b{self.made}-{len(self.batches)}-{len(self.ended)}"
        if ready and batch_id not in self.batches:
            batch = self.store.lease(batch_id, ready)
            self.batches[batch_id] = [meta.sample_id for meta in batch.samples]

    @rule(data=st.data(), trained=st.booleans())
    @precondition(lambda self: self.batches)
    def end_lease(self, data: st.DataObject, trained: bool) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.batches)))
        del self.batches[batch_id]
        if trained:
            self.store.trained(batch_id)
            self.follow()
        else:
            self.store.give_back(batch_id)

    @invariant()
    def every_sample_is_alive_or_ended_once(self) -> None:
        self.store.check()
        counts = self.store.counts()
        assert counts.running + counts.buffered == len(self.alive)
        assert counts.trained + sum(counts.dropped.values()) == sum(self.ended.values())
        assert set(self.ended.values()) <= {1}
        assert counts.admitted == len(self.alive) + len(self.ended)
        assert counts.buffered == len(self.in_state(SampleState.READY))

    @invariant()
    def groups_are_ready_only_as_a_whole_and_large_enough(self) -> None:
        sizes = Counter(one.partition("/")[0] for one in self.in_state(SampleState.READY))
        assert all(size >= 2 for size in sizes.values())
        open_groups = {one.partition("/")[0] for one, state in self.alive.items() if state is not SampleState.READY}
        assert not open_groups & set(sizes)


test_a2_conservation_holds_through_any_life = Lives.TestCase
test_a2_conservation_holds_through_any_life.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
