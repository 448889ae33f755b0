"""Which waiting request is sent next: what goes on, then the due batch, then probes, then the longest."""

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scene import rollout

from slimerl.rollout.lengths import ResponseLengths
from slimerl.rollout.order import Entry, LengthOrder, Progress

BUDGET = 100


def waiting(order: LengthOrder[str], group: str, batch: int = 0, samples: int = 2, prompt: str = "") -> None:
    """Admit a group and let its samples wait; it is of the prompt of its own name unless told otherwise."""
    prompt = prompt or group
    order.admit(group, prompt, batch)
    for number in range(samples):
        order.add(f"{group}/{number}", group, Progress(prompt, 0, BUDGET))


def sent(order: LengthOrder[str], count: int | None = None) -> list[str]:
    """The next ones, each sent."""
    items = []
    while (count is None or len(items) < count) and (entry := order.take()) is not None:
        order.sent(entry)
        items.append(entry.item)
    return items


def knowing(**lengths: int) -> LengthOrder[str]:
    known = ResponseLengths()
    for prompt, tokens in lengths.items():
        known.observe(prompt, tokens)
    return LengthOrder(known)


def test_of_known_prompts_the_longest_goes_first_siblings_together():
    order = knowing(a=10, b=30, c=20)
    for group in "abc":
        waiting(order, group)
    assert sent(order) == ["b/0", "b/1", "c/0", "c/1", "a/0", "a/1"]


def test_of_unknown_prompts_one_sample_of_each_group_goes_first():
    order = knowing(known=90)
    for group in ("a", "b", "known"):
        waiting(order, group)
    assert sent(order, 2) == ["a/0", "b/0"]
    order.lengths.observe("a", 95)
    assert sent(order) == ["b/1", "a/1", "known/0", "known/1"], "the probe of b runs still: longer than all that ended"


def test_an_earlier_batch_is_not_overtaken_however_long_the_next_one_is():
    order = knowing(short=1, long=99)
    waiting(order, "long", batch=1)
    waiting(order, "short", batch=0)
    waiting(order, "unknown", batch=1)
    assert sent(order) == ["short/0", "short/1", "unknown/0", "unknown/1", "long/0", "long/1"]


def test_a_sample_that_has_tokens_goes_before_all_that_have_none():
    order = knowing(a=90, b=80)
    waiting(order, "a")
    order.admit("b", "b", 0)
    order.add("b/0", "b", Progress("b", 5, BUDGET - 5))
    assert sent(order) == ["b/0", "a/0", "a/1"]


def test_what_goes_on_is_ordered_by_batch_and_by_what_is_left():
    order = knowing(a=90, b=50)
    for group, batch in (("a", 0), ("b", 0), ("c", 1)):
        order.admit(group, group, batch)
    order.add("c/0", "c", Progress("c", 10, 90))
    order.add("b/0", "b", Progress("b", 10, 90))
    order.add("a/0", "a", Progress("a", 10, 90))
    order.add("c/1", "c", None)
    assert sent(order) == ["c/1", "a/0", "b/0", "c/0"], "one that failed elsewhere goes before them"


def test_siblings_that_end_first_do_not_cost_a_long_group_its_place():
    """Fault: the shorter answers of a group end first, and make it look short."""
    order = knowing(a=50, b=40)
    waiting(order, "a", samples=4)
    waiting(order, "b", samples=4)
    sent(order, 2)
    for _ in range(16):
        order.lengths.observe("a", 2)
    assert sent(order, 2) == ["a/2", "a/3"]


def test_a_group_that_is_forgotten_keeps_nobody_waiting_for_ever():
    order = knowing()
    waiting(order, "a")
    order.forget("a")
    order.forget("never admitted")
    assert sorted(sent(order)) == ["a/0", "a/1"]
    order.lengths.observe("a", 3)
    assert len(order) == 0


class OrderOnTrial(RuleBasedStateMachine):
    """Against a plain model: what waits, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self.order: LengthOrder[int] = LengthOrder(ResponseLengths(prompts=3))
        self.batches: dict[str, int] = {}
        self.waits: dict[int, tuple[str, int, int]] = {}
        """Item → its group, the tokens that it has, and the batch that its group was due in when it began to wait."""
        self.entries: dict[int, Entry[int]] = {}
        self.taken: list[Entry[int]] = []
        self.seen: Counter[int] = Counter()
        self.made = 0

    @rule(group=st.sampled_from("abcdef"), batch=st.integers(0, 2), samples=st.integers(1, 4))
    def a_group_is_admitted(self, group: str, batch: int, samples: int) -> None:
        if group in self.batches:
            return
        self.batches[group] = batch
        self.order.admit(group, group.upper(), batch)
        for _ in range(samples):
            self.add(group, 0)

    @rule(group=st.sampled_from("abcdefx"), done=st.integers(1, 90))
    def a_sample_goes_on(self, group: str, done: int) -> None:
        self.add(group, done)

    def add(self, group: str, done: int) -> None:
        self.made += 1
        progress = Progress(group.upper(), done, BUDGET - done)
        self.entries[self.made] = self.order.add(self.made, group, progress)
        self.waits[self.made] = (group, done, self.batches.get(group, -1))

    @rule(send=st.booleans())
    def one_is_taken(self, send: bool) -> None:
        entry = self.order.take()
        assert (entry is None) == (not self.waits)
        if entry is None:
            return
        _, done, batch = self.waits.pop(entry.item)
        for _, has, due in self.waits.values():
            assert done or not has, "what goes on goes first"
            if bool(done) == bool(has):
                assert batch <= due, "an earlier batch goes first"
        if send:
            self.order.sent(entry)
            self.seen[entry.item] += 1
        else:
            self.taken.append(entry)

    @precondition(lambda self: self.taken)
    @rule()
    def the_last_one_is_put_back(self) -> None:
        entry = self.taken.pop()
        assert entry.progress is not None
        self.order.put_back(entry)
        self.waits[entry.item] = (entry.group, entry.progress.done, self.batches.get(entry.group, -1))

    @precondition(lambda self: self.waits)
    @rule(chance=st.integers(0, 1 << 20))
    def one_is_cancelled(self, chance: int) -> None:
        item = sorted(self.waits)[chance % len(self.waits)]
        del self.waits[item]
        self.order.remove(self.entries[item])
        self.order.remove(self.entries[item])

    @rule(prompt=st.sampled_from("ABCDEFX"), tokens=st.integers(1, BUDGET))
    def a_response_ends(self, prompt: str, tokens: int) -> None:
        self.order.lengths.observe(prompt, tokens)

    @rule(group=st.sampled_from("abcdef"))
    def a_group_is_settled(self, group: str) -> None:
        if group in self.batches and not any(each == group for each, *_ in self.waits.values()):
            if any(entry.group == group for entry in self.taken):
                return
            del self.batches[group]
            self.order.forget(group)

    @invariant()
    def what_waits_is_counted_and_nothing_is_sent_twice(self) -> None:
        assert len(self.order) == len(self.waits)
        assert max(self.seen.values(), default=0) <= 1

    def teardown(self) -> None:
        for entry in self.taken:
            self.order.put_back(entry)
            self.waits[entry.item] = (entry.group, 0, 0)
        left = []
        while (entry := self.order.take()) is not None:
            left.append(entry.item)
        assert sorted(left) == sorted(self.waits)


test_whatever_happens_each_request_is_handed_out_once_and_in_order = OrderOnTrial.TestCase
test_whatever_happens_each_request_is_handed_out_once_and_in_order.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def test_the_role_probes_each_group_and_sends_the_longest_first_once_it_knows_the_prompts():
    """One slot, sixteen prompts of different lengths, two epochs."""

    async def scene() -> list[int]:
        async with rollout(engines=1, groups=16, size=2, capacity=1, staleness=1, steps=2) as made:
            made.engines[0].answer = lambda tokens, seed: [5] * (2 + tokens[1]) + [2]
            await made.serve(0)
            await made.batch(0)
            await made.serve(1)
            await made.batch(1)
            return [request["input_ids"][1] for request in made.engines[0].requests]

    async def play() -> list[int]:
        async with asyncio.timeout(30):
            return await scene()

    prompts = asyncio.run(play())
    first, second = prompts[:32], prompts[32:]
    longest_first = list(range(15, -1, -1))
    assert sorted(first[:16]) == longest_first[::-1], "a probe of each group"
    last = first[15]
    assert first[16:] == [last, *(each for each in longest_first if each != last)], "its probe ran still"
    assert second == [each for each in longest_first for _ in range(2)], "siblings follow each other"
