"""The prefix index finds what a brute-force search of the prompts sent finds, and keeps its bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slimerl.rollout.prefix_index import BLOCK_TOKENS, PrefixIndex, hash_blocks

SLOTS = (0, 3, 70)
BOUND = 4


def prompt(*blocks: int, rest: int = 0) -> tuple[int, ...]:
    """Whole blocks, each of one token id, and some tokens that fill no block."""
    return tuple(block for block in blocks for _ in range(BLOCK_TOKENS)) + (9,) * rest


prompts = st.lists(st.integers(1, 2), max_size=6).map(lambda blocks: prompt(*blocks))


class BruteForce:
    """Per engine the list of prefixes that it holds, least recently used first: no hashes, no shared structure."""

    def __init__(self) -> None:
        self.version = -1
        self.held: dict[int, list[tuple[int, ...]]] = {}

    def insert(self, slot: int, version: int, tokens: tuple[int, ...]) -> None:
        if slot not in self.held or version != self.version:
            return
        held = self.held[slot]
        for end in range(min(len(tokens) // BLOCK_TOKENS, BOUND), 0, -1):
            prefix = tokens[: end * BLOCK_TOKENS]
            if prefix in held:
                held.remove(prefix)
            held.append(prefix)
        del held[: max(0, len(held) - BOUND)]

    def match(self, version: int, tokens: tuple[int, ...]) -> dict[int, int]:
        found = {}
        for slot, held in self.held.items() if version == self.version else ():
            depth = 0
            while (depth + 1) * BLOCK_TOKENS <= len(tokens) and tokens[: (depth + 1) * BLOCK_TOKENS] in held:
                depth += 1
            if depth:
                found[slot] = depth
        return found


class IndexAgainstBruteForce(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.reference = BruteForce()

    @initialize()
    def all_engines_are_there(self) -> None:
        for slot in SLOTS:
            self.an_engine_joins_empty(slot)

    @rule(slot=st.sampled_from(SLOTS))
    def an_engine_joins_empty(self, slot: int) -> None:
        self.index.add(slot, BOUND)
        self.reference.held[slot] = []

    @rule(slot=st.sampled_from(SLOTS))
    def an_engine_leaves(self, slot: int) -> None:
        self.index.drop(slot)
        self.reference.held.pop(slot, None)

    @rule()
    def the_weights_change(self) -> None:
        self.index.renew(self.index.version + 1)
        self.reference.version += 1
        self.reference.held = {slot: [] for slot in self.reference.held}

    @rule(slot=st.sampled_from(SLOTS), tokens=prompts, behind=st.integers(0, 1))
    def a_prompt_is_sent(self, slot: int, tokens: tuple[int, ...], behind: int) -> None:
        version = self.index.version - behind
        self.index.insert(slot, version, hash_blocks(tokens))
        self.reference.insert(slot, version, tokens)

    @rule(tokens=prompts, behind=st.integers(0, 1))
    def a_prompt_is_looked_up(self, tokens: tuple[int, ...], behind: int) -> None:
        version = self.index.version - behind
        found = self.reference.match(version, tokens)
        assert self.index.match(version, hash_blocks(tokens)) == found
        assert {slot: self.index.depth(slot, version, hash_blocks(tokens)) for slot in SLOTS} == {
            slot: found.get(slot, 0) for slot in SLOTS
        }

    @invariant()
    def memory_is_bounded_and_nothing_is_left_behind(self) -> None:
        assert all(self.index.blocks(slot) <= BOUND for slot in SLOTS)
        assert len(self.index) == sum(len(held) for held in self.reference.held.values())
        assert sum(mask.bit_count() for mask in self.index._holders.values()) == len(self.index)
        assert self.index._before.keys() == self.index._holders.keys()
        assert all(held.ends.keys() <= held.blocks.keys() for held in self.index._held.values())


TestIndexAgainstBruteForce = IndexAgainstBruteForce.TestCase
TestIndexAgainstBruteForce.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(prompts, st.lists(st.integers(0, 5), max_size=200))
@settings(max_examples=100, deadline=None)
def test_keys_of_a_longer_prompt_continue_those_of_its_prefix(start: tuple[int, ...], more: list[int]) -> None:
    whole = start + tuple(more)
    known = hash_blocks(start)
    assert hash_blocks(whole, known) == hash_blocks(whole)
    assert hash_blocks(whole)[: len(known)] == known


@given(prompts, prompts)
@settings(max_examples=80, deadline=None)
def test_equal_keys_mean_equal_tokens_from_the_start(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    for number, (a, b) in enumerate(zip(hash_blocks(one), hash_blocks(other), strict=False), start=1):
        assert (a == b) == (one[: number * BLOCK_TOKENS] == other[: number * BLOCK_TOKENS])


def test_a_history_that_was_shortened_is_hashed_anew() -> None:
    known = hash_blocks(prompt(1, 2, 3, 4))
    edited = prompt(1, 3, 4, 4)
    assert hash_blocks(edited, known) == hash_blocks(edited)


def test_a_system_prompt_that_was_edited_is_hashed_anew() -> None:
    known = hash_blocks(prompt(1, 2, 3, 4, 5, 6))
    edited = prompt(7, 2, 3, 4, 5, 6)
    assert hash_blocks(edited, known) == hash_blocks(edited)


def test_only_new_tokens_are_hashed() -> None:
    class Counting(tuple):  # counts the tokens that are cut out of it
        cut = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            Counting.cut += len(found)
            return found

    history = prompt(*range(1, 101))
    known = hash_blocks(history)
    hash_blocks(Counting(history + prompt(500, 501)), known)
    assert Counting.cut == (4 + 2) * BLOCK_TOKENS  # the witnesses, and what is new


def test_a_prompt_that_goes_on_costs_what_is_new_of_it() -> None:
    class Counting(list):  # counts the keys that are looked at
        seen = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            Counting.seen += len(found) if isinstance(key, slice) else 1
            return found

    index = PrefixIndex(version=0)
    index.add(0, 10_000)
    history = prompt(*range(1, 1001))
    index.insert(0, 0, hash_blocks(history))
    index.insert(0, 0, Counting(hash_blocks(history + prompt(2000, 2001))))
    assert Counting.seen < 20  # of 1,002: those that halving looks at, and those that are new
    assert index.blocks(0) == 1002


def test_a_shared_start_outlives_the_ends_of_the_prompts_that_share_it() -> None:
    index = PrefixIndex(version=0)
    index.add(0, 3)
    index.insert(0, 0, hash_blocks(prompt(1, 2)))
    index.insert(0, 0, hash_blocks(prompt(1, 3)))
    index.insert(0, 0, hash_blocks(prompt(1, 4)))
    assert index.match(0, hash_blocks(prompt(1, 2))) == {0: 1}
    assert index.match(0, hash_blocks(prompt(1, 4))) == {0: 2}
    index.insert(0, 0, hash_blocks(prompt(5, 6)))
    assert index.match(0, hash_blocks(prompt(1, 4))) == {0: 1}
