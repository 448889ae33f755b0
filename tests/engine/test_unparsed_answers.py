"""An answer is the same, whether its log-probabilities were read apart from it or with it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slimerl.engine.protocol import Generation, ProtocolError, read_answer, read_generation

TEXTS = st.sampled_from(["", "]]", '"output_token_logprobs":[[-1.0,5,null]]', "[[", "\\", "é"])
LOGPROBS = st.one_of(st.floats(-40, 0), st.floats(-40, 0), st.integers(-3, 0), st.none())
TOKENS = st.one_of(st.integers(0, 1 << 40), st.integers(0, 9), st.floats(0, 3))
PAIRS = st.lists(st.tuples(LOGPROBS, TOKENS, st.one_of(st.none(), st.none(), TEXTS)).map(list), max_size=4)
ODD = st.one_of(st.none(), st.just(0), st.just([[]]), st.just([[-0.5, 3]]), st.just("x"))


@st.composite
def answers(draw: st.DrawFn) -> Any:
    pairs = draw(st.one_of(PAIRS, PAIRS, PAIRS, ODD))
    listed = pairs if isinstance(pairs, list) else []
    ids = draw(st.sampled_from([[pair[1] for pair in listed if len(pair) > 1], [1], None]))
    meta = {
        "finish_reason": draw(st.sampled_from([{"type": "stop"}, {"type": "length", "length": 0}, "abort"])),
        "weight_version": draw(st.sampled_from(["3", "3", "x"])),
        "novelty": draw(TEXTS),
    }
    items: list[tuple[str, Any]] = list(meta.items())
    items.insert(draw(st.integers(0, 3)), ("output_token_logprobs", pairs))
    answer: dict[str, Any] = {"text": draw(TEXTS), "output_ids": ids, "meta_info": dict(items)}
    if draw(st.booleans()):
        del answer["meta_info"]["output_token_logprobs"]
        answer["output_token_logprobs"] = pairs
    return answer


def outcome(read: Any, given: Any) -> Any:
    """With log-probabilities as they would be told to a client."""
    try:
        found: Generation = read(given)
    except ProtocolError as error:
        return str(error)[:60]
    plain = msgspec.json.decode(msgspec.json.encode([found.meta, found.answer]))
    types = [list(map(type, each)) for each in (found.tokens, found.logprobs, found.versions)]
    return found.tokens, found.logprobs, found.versions, found.finish_reason, plain, types


def with_token(token: object) -> dict[str, Any]:
    """An answer of one token, which may be none."""
    meta = {"finish_reason": "x", "weight_version": "3", "output_token_logprobs": [[-0.5, token, None]]}
    return {"output_ids": [token], "meta_info": meta}


@example(
    {
        "output_ids": [7],
        "output_token_logprobs": [[-0.5, 7, None]],
        "meta_info": {"finish_reason": "x", "weight_version": "3"},
    },
    (",", ":"),
)
@example(with_token(7.5), (",", ":"))
@example(with_token(0.0), (",", ":"))
@example(with_token(None), (",", ":"))
@example(with_token(True), (",", ":"))
@example(with_token(-1), (",", ":"))
@given(answers(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_an_answer_is_the_same_however_it_is_read(answer, separators):
    content = json.dumps(answer, separators=separators).encode()
    assert outcome(read_answer, content) == outcome(read_generation, json.loads(content))


def test_log_probabilities_are_passed_on_as_they_were_written():
    written = b"[[-0.12345678901234567890,7,null],[-2e-3,8,null]]"
    content = (
        b'{"text":"","output_ids":[7,8],"meta_info":{"finish_reason":{"type":"stop"},"output_token_logprobs":%b,'
        b'"weight_version":"3"}}' % written
    )
    found = read_answer(content)
    assert (found.tokens, found.logprobs, found.versions) == ([7, 8], [-0.12345678901234568, -0.002], [3, 3])
    assert written in msgspec.json.encode(found.meta)


@pytest.mark.parametrize(
    "content", [b"", b"busy", b'{"meta_info":{"output_token_logprobs":[[-0.5,3,null]]', b"[[]]", b"null"]
)
def test_what_is_no_answer_is_an_error_of_the_protocol(content):
    with pytest.raises(ProtocolError):
        read_answer(content)


def of_tokens(*tokens):
    """The body of an answer with these in both places that tell of tokens."""
    pairs = [[-0.5, token, None] for token in tokens]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs, "weight_version": "3"}
    return msgspec.json.encode({"text": "", "output_ids": tokens, "meta_info": meta})


@pytest.mark.parametrize("token", [None, "7", 7.5, "a"], ids=repr)
def test_what_stands_in_the_place_of_a_token_and_is_none_is_an_error_of_the_protocol(token):
    with pytest.raises(ProtocolError):
        read_answer(of_tokens(3, token))


def test_a_token_that_is_written_as_a_fraction_is_a_whole_number():
    found = read_answer(of_tokens(3, 7.0))
    assert (found.tokens, set(map(type, found.tokens))) == ([3, 7], {int})
