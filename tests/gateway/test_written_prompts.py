"""Prompts of ids that nobody reads: what goes to the engine and into the record is what reading them would give."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fake_engine import STOP
from gateway_scene import KEY, Front, fake_engine_of, ids, play
from hypothesis import example, given
from hypothesis import strategies as st

from slimerl.rollout.gateway.errors import ApiError
from slimerl.rollout.gateway.requests import GenerateBody, cut_generate, read_body
from slimerl.samples.written_ids import NotPlain, read, written

TRICKY = st.sampled_from(
    [
        '"input_ids":[1]',
        '"input_ids": [',
        "]",
        "input_ids",
        '\\"input_ids":[5]',
    ]
)
IDS = st.lists(st.integers(-1, 1 << 31), max_size=5)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "input_ids": st.one_of(IDS, IDS, IDS, st.none(), TRICKY, st.lists(IDS, max_size=2)),
    "text": st.one_of(st.none(), TRICKY),
    "rid": TRICKY,
    "model": TRICKY,
    "stream": st.booleans(),
    "sampling_params": st.fixed_dictionaries(
        {}, optional={"stop": st.lists(TRICKY, max_size=2), "max_new_tokens": st.integers(1, 9), "input_ids": IDS}
    ),
    "other": st.just(1),
}
PAIRS = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(lambda name: st.tuples(st.just(name), VALUES[name])), max_size=5
)


@example([("input_ids", [1]), ("input_ids", [])], (",", ":"), False)
@given(PAIRS, st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]), st.booleans())
def test_a_body_whose_ids_are_cut_out_says_what_it_said(pairs, separators, escaped):
    """Also one that names a field twice, or writes it with an escape, or hides what looks like it in a text."""
    members = [f"{json.dumps(name)}{separators[1]}{json.dumps(value, separators=separators)}" for name, value in pairs]
    whole = "{" + separators[0].join(members) + "}"
    data = (whole.replace('"input_ids"', '"input\\u005fids"', 1) if escaped else whole).encode()
    expected, text = said(read_body, data, GenerateBody), None
    found = said(cut_generate, data)
    if isinstance(found, tuple):
        found, text = found
    if text is not None:
        try:
            found.input_ids = read(text).tolist()
        except NotPlain:
            return  # everything is read then
    assert found == expected


def said(read: Callable[..., Any], *given: Any) -> Any:
    """What it gives, or the message of its error."""
    try:
        return read(*given)
    except ApiError as error:
        return str(error)


def request(prompt: list[int], separators: tuple[str, str]) -> bytes:
    body = {"sampling_params": {"max_new_tokens": 6}, "input_ids": prompt, "return_logprob": True}
    return json.dumps(body, separators=separators).encode()


async def post(front: Front, data: bytes, session: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}", "x-session-id": session, "content-type": "application/json"}
    async with front.http.post(f"{front.url}/generate", data=data, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def test_m6_turns_of_written_ids_go_on_token_by_token_however_a_client_writes_them():
    """Spaces or none, and a turn that another way of asking has to find: each is the same ids."""

    async def act(front: Front) -> None:
        engine, told, prompt = fake_engine_of(front), [], ids("one")
        for separators in ((",", ":"), (", ", ": "), (" , ", ":"), (",", ":")):
            answer = await post(front, request(prompt, separators), "s")
            assert engine.requests[-1]["input_ids"] == prompt
            told.append(answer["output_ids"])
            assert [pair[1] for pair in answer["meta_info"]["output_token_logprobs"]] == told[-1]
            prompt = [*prompt, *told[-1], STOP, 7]
        client = front.client("s")
        await client.completions.create(model="any", prompt=prompt, max_tokens=4)
        assert engine.requests[-1]["input_ids"] == prompt
        turns = front.sessions.get("s").turns
        assert [turn.parent for turn in turns] == [None, *turns[:-1]]
        assert [list(turn.observed) for turn in turns[1:]] == [[STOP, 7]] * 4
        assert [list(turn.tokens) for turn in turns[:-1]] == told
        assert [len(turn.logprobs) for turn in turns] == [len(turn.tokens) for turn in turns]
        assert turns[-1].context() == prompt

    play(act, engines=1)


def test_m6_ids_that_only_begin_like_what_was_told_open_a_branch():
    """Fault: the last id of what was told is the beginning of another: 1, 2 and 1, 25."""

    async def act(front: Front) -> None:
        first = await post(front, request([5], (",", ":")), "s")
        whole = [5, *first["output_ids"]]
        await post(front, request([*whole[:-1], whole[-1] * 10 + 5, 9], (",", ":")), "s")
        await post(front, request([*whole, 9], (",", ":")), "s")
        # a text is not the ids that it spells
        await front.post("/generate", {"text": written(whole).decode() + "9", "sampling_params": {}}, "s")
        one, edited, two, text = front.sessions.get("s").turns
        assert (edited.parent, two.parent, text.parent) == (None, one, None)
        assert list(two.observed) == [9]

    play(act, engines=1)


def test_a_turn_of_written_ids_that_new_weights_interrupt_is_recorded_whole():
    """Fault: the engine ends the first part of a turn early; the rest is asked for behind it."""

    async def act(front: Front) -> None:
        engine = fake_engine_of(front)
        answer = await post(front, request(ids("one"), (",", ":")), "s")
        (turn,) = front.sessions.get("s").turns
        assert list(turn.tokens) == answer["output_ids"]
        assert len(engine.requests) == 3
        for before, after in zip(engine.requests, engine.requests[1:], strict=False):
            assert after["input_ids"][: len(before["input_ids"])] == before["input_ids"]
        assert turn.finish_reason == "length"
        assert len(turn.tokens) == len(answer["meta_info"]["output_token_logprobs"]) == 6
        # and the next turn finds it
        prompt = [*ids("one"), *answer["output_ids"], STOP]
        await post(front, request(prompt, (",", ":")), "s")
        assert front.sessions.get("s").last.parent is turn

    play(act, engines=1, chunk_tokens=2, answer=lambda prompt, seed: [50 + len(prompt)] * 8)


def test_what_looks_like_ids_and_is_none_is_refused_as_ever():
    async def act(front: Front) -> None:
        headers = {"Authorization": f"Bearer {KEY}", "x-session-id": "s"}
        for inside, code in (("1,", "invalid_json"), ("1,-2", None), ("", None), ("1.5", None), ("[1]", None)):
            data = f'{{"input_ids":[{inside}],"sampling_params":{{}}}}'.encode()
            async with front.http.post(f"{front.url}/generate", data=data, headers=headers) as response:
                answer = await response.json()
            assert response.status == 400, answer
            assert answer["error"]["code"] == code or code is None
        assert not fake_engine_of(front).requests
        await asyncio.sleep(0)
        assert not front.gateway.open_requests

    play(act, engines=1)
