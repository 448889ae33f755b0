"""Turns are runs of sampled tokens, each with what was observed behind it."""

import time
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from slimerl.rollout.agents.turns import Turn, last_said, seen_first, turns_of
from slimerl.samples.sample import Sample


def sample_of(marks: list[bool]) -> Sample:
    sample = Sample("s", "g", "p", (1,))
    for token, mark in enumerate(marks):
        sample.append([token], *(([-0.1], 0) if mark else ()))
    return sample


@given(st.lists(st.booleans(), max_size=40))
def test_turns_are_what_the_marks_say(marks):
    runs = [
        (mark, tuple(place for place, _ in run)) for mark, run in groupby(enumerate(marks), key=lambda each: each[1])
    ]
    first = runs.pop(0)[1] if runs and not runs[0][0] else ()
    expected = [Turn(runs[i][1], runs[i + 1][1] if i + 1 < len(runs) else ()) for i in range(0, len(runs), 2)]
    sample = sample_of(marks)
    assert turns_of(sample) == expected
    assert seen_first(sample) == first
    assert last_said(sample) == list(expected[-1].sampled if expected and not expected[-1].observed else ())


def test_a8_the_turns_of_a_long_response_are_found_in_a_moment():
    sample = sample_of(([True] * 900 + [False] * 100) * 40)
    begun = time.process_time()
    for _ in range(10):
        assert len(turns_of(sample)) == 40
    assert (time.process_time() - begun) / 10 < 0.005
