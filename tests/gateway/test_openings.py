"""Prompts that many sessions open with are read once, and never taken for another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.rollout.gateway.openings import Openings
from slimerl.samples.written_ids import NotPlain, written


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=30))
def test_every_prompt_is_what_it_says_and_memory_is_bounded(prompts):
    openings, held = Openings(max_tokens=12), []
    for prompt in prompts:
        found = openings.read(written(prompt))
        assert (list(found), found.text) == (prompt, written(prompt))
        held = [each for each in held if each is not found] + [found]
        while sum(map(len, held)) > 12:
            held.pop(0)
        assert openings.tokens == sum(map(len, held))
        assert list(openings._known.values()) == held


def test_siblings_have_one_prompt_and_what_is_none_is_not_remembered():
    openings = Openings()
    assert openings.read(b"1,2,") is openings.read(b"1,2,")
    for _ in range(2):
        with pytest.raises(NotPlain):
            openings.read(b"1,x,")
    assert openings.tokens == 2


def test_a_prompt_that_is_longer_than_all_may_be_is_read_nevertheless():
    openings = Openings(max_tokens=3)
    assert list(openings.read(written(list(range(5))))) == [0, 1, 2, 3, 4]
    assert openings.tokens == 0
