"""When a sample that is generated in parts goes on, and what has ended it."""

import pytest

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.rollout.parts import Parts
from slimerl.samples.sample import Sample

STOP, MOST = 2, 8
PARTS = Parts(SamplingParams(MOST, stop_token_ids=(STOP,)), run_seed=1, chunk_tokens=4)


def after(*parts: tuple[list[int], str]) -> Sample:
    sample = Sample("g/0", "g", "p", (10, 11))
    for tokens, reason in parts:
        assert not PARTS.is_complete(sample)
        PARTS.append(sample, Generation(tokens, [-0.5] * len(tokens), [0] * len(tokens), reason, {}, {}))
    return sample


@pytest.mark.parametrize(
    ("parts", "ended_by"),
    [
        ([([5, 6, 7, 8], "length")], None),
        ([([5, 6], "abort")], None),
        ([([], "abort")], None),
        ([([5, STOP], "stop")], "stop"),
        ([([5, STOP], "abort")], "stop"),
        ([([5, 6, 7, STOP], "length")], "stop"),
        ([([5, 6, 7, 8], "length"), ([5, 6, 7, 8], "length")], "length"),
        ([([5, 6, 7, 8], "length"), ([5, 6, 7, 8], "abort")], "length"),
        ([([5, 6, 7, 8], "length"), ([5, 6, 7, STOP], "abort")], "stop"),
    ],
)
def test_a_sample_ends_with_its_stop_token_or_its_budget_and_with_nothing_else(parts, ended_by):
    assert after(*parts).finish_reason == ended_by


def test_a7_the_next_part_asks_for_what_is_left_and_belongs_to_the_same_session():
    first = PARTS.next_request(after())
    later = PARTS.next_request(after(([5, 6, 7, 8], "length"), ([5], "abort")))
    assert (first.params.max_new_tokens, later.params.max_new_tokens) == (4, 3)
    assert later.tokens == (10, 11, 5, 6, 7, 8, 5)
    assert first.session == later.session == "g/0"
    assert first.request_id != later.request_id
