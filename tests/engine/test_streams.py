"""A streamed answer against the same answer in one piece, however the server and the network cut it."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.engine.protocol import Generation, ProtocolError, read_generation
from slimerl.engine.streams import StreamedAnswer, StreamRefused

TOKENS = [7, 7, 8, 9, 7, 10, 11, 12]
FINISH = {"type": "stop", "matched": 12}


def event(count: int, start: int, finish: dict[str, Any] | None, switch: int) -> dict[str, Any]:
    """That holds the tokens from `start` up to `count`; those from `switch` on have version 4."""
    spans = [(3, 0, min(switch, count)), (4, switch, count)]
    meta = {
        "id": "r",
        "finish_reason": finish,
        "completion_tokens": count,
        "cached_tokens": 2,
        "output_token_logprobs": [[-token / 8, token, None] for token in TOKENS[start:count]],
        "weight_version": "4",
        "weight_versions": [
            {"version": str(version), "start": start, "end": end} for version, start, end in spans if end > start
        ],
    }
    return {"text": "", "output_ids": TOKENS[start:count], "meta_info": meta}


def body(events: list[dict[str, Any]], newline: str = "\n") -> bytes:
    said = [*map(json.dumps, events), "[DONE]"]
    return "".join(f"data: {each}{newline}{newline}" for each in said).encode()


def read(data: bytes, cuts: list[int], told: list[Generation]) -> Generation:
    answer = StreamedAnswer(told.append)
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    for start, end in pairwise(places):
        answer.feed(data[start:end])
    return answer.generation()


@given(
    ends=st.sets(st.integers(1, len(TOKENS) - 1)),
    cumulative=st.booleans(),
    switch=st.integers(0, len(TOKENS)),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    newline=st.sampled_from(["\n", "\r\n"]),
)
@settings(deadline=None)
def test_what_is_told_and_what_comes_of_it_are_the_answer_in_one_piece(ends, cumulative, switch, cuts, newline):
    counts = [*sorted(ends), len(TOKENS)]
    starts = [0] * len(counts) if cumulative else [0, *counts[:-1]]
    events = [
        event(count, start, FINISH if count == len(TOKENS) else None, switch)
        for count, start in zip(counts, starts, strict=True)
    ]
    told: list[Generation] = []
    found = read(body(events, newline), cuts, told)
    whole = read_generation(event(len(TOKENS), 0, FINISH, switch))
    assert found == whole
    assert [len(new.tokens) for new in told] == [end - start for start, end in zip([0, *counts], counts, strict=False)]
    assert [token for new in told for token in new.tokens] == whole.tokens
    assert [version for new in told for version in new.versions] == whole.versions


def test_an_abort_that_tells_the_last_id_again_does_not_double_it():
    """As SGLang ends a request that waits, with all logprobs; also where that comes together with tokens."""
    aborted = event(3, 0, {"type": "abort", "message": "Aborted"}, 0)
    for events in (
        [event(2, 0, None, 0), event(3, 2, None, 0), {**aborted, "output_ids": TOKENS[2:3]}],
        [event(1, 0, None, 0), {**aborted, "output_ids": [TOKENS[1], TOKENS[2], TOKENS[2]]}],
    ):
        told: list[Generation] = []
        found = read(body(events), [], told)
        assert (found.tokens, found.finish_reason) == (TOKENS[:3], "abort")
        assert [token for new in told for token in new.tokens] == TOKENS[:3]


def with_meta(**changes):
    """An event whose `meta_info` has something else."""
    whole = event(1, 0, None, 0)
    return {**whole, "meta_info": {**whole["meta_info"], **changes}}


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([event(2, 0, None, 0)], "ended after 2 tokens without a finish reason"),
        ([event(2, 0, None, 0), event(5, 3, FINISH, 0)], "3 tokens are new after 2, but an event has 2 ids"),
        ([event(3, 0, None, 0), event(2, 0, FINISH, 0)], "-1 tokens are new after 3"),
        ([event(2, 0, FINISH, 0), event(3, 2, FINISH, 0)], "an event that is none of an answer"),
        ([{"output_ids": [1]}], "an event that is none of an answer"),
        ([event(1, 0, None, 0) | {"output_ids": 5}], "TypeError"),
        ([with_meta(weight_versions=[4])], "TypeError"),
        ([with_meta(weight_versions=[{"version": "4", "start": 0}])], "without 'end'"),
        ([with_meta(finish_reason={})], "without 'type'"),
        ([with_meta(finish_reason={"type": "abort", "status_code": "x"})], "TypeError"),
    ],
)
def test_a_stream_that_loses_tokens_or_makes_no_sense_is_an_error(events, problem):
    with pytest.raises(ProtocolError, match=problem):
        read(body(events), [], [])


def test_an_error_in_a_stream_has_the_status_that_it_would_have_had():
    refused = {"error": {"message": "too long", "code": 400}}
    shed = event(0, 0, {"type": "abort", "status_code": 503, "message": "queue is full"}, 0)
    for ended, status in ((refused, 400), (shed, 503)):
        with pytest.raises(StreamRefused) as caught:
            read(body([ended]), [], [])
        assert caught.value.status == status
