"""Text around tokens: what is new in a conversation, what of a reply may be told already, tool calls, requests."""

import itertools

import msgspec
import pytest
from gateway_scene import END, TEMPLATE, ids, model_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from slimerl.rollout.gateway.conversation import ConversationError, digests, frame_digest, read_messages
from slimerl.rollout.gateway.errors import ApiError
from slimerl.rollout.gateway.replies import Reply
from slimerl.rollout.gateway.requests import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    read_body,
    read_chat,
    read_completion,
    read_generate,
)
from slimerl.rollout.gateway.template import TemplateError
from slimerl.rollout.gateway.text import ModelText
from slimerl.rollout.gateway.tool_calls import OPEN

# --- templates

CALL = {"id": "call_0", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}
CALL_TEXT = '\n<tool_call>\n{"name": "calc", "arguments": {"x": 1}}\n</tool_call>'
NEW = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "system"]), "content": st.text("ab<> \n", max_size=8)}
    ),
    max_size=3,
)


@given(new=NEW, calls=st.booleans(), ended=st.booleans())
@settings(deadline=None)
def test_m6_reply_and_what_follows_are_what_the_template_writes_of_the_whole(new, calls, ended):
    """Reference: the library renders all messages at once."""
    frame = model_text().frame
    opening = [{"role": "user", "content": "question"}]
    reply = {"role": "assistant", "content": "answer", **({"tool_calls": [CALL]} if calls else {})}
    said = "answer" + (CALL_TEXT if calls else "") + ("<|im_end|>" if ended else "")
    following = frame.following(read_messages([reply])[0], read_messages(new) if new else [], {}, END if ended else 7)
    whole = frame.opening(opening, None, {}) + said + following
    assert whole == frame.opening(read_messages([*opening, reply, *new]), None, {})


def test_m6_a_template_that_drops_old_thoughts_does_not_reach_back_into_a_reply():
    """Fault: rendered as a whole, the reply before the last question has lost what was thought."""
    frame = model_text().frame
    messages = read_messages(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>long</think>a"},
            {"role": "user", "content": "r"},
        ]
    )
    assert "long" not in frame.opening(messages, None, {})
    following = frame.following(messages[1], messages[2:], {}, END)
    assert following == "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    assert frame.following(messages[1], messages[2:], {"quiet": True}, END) == following + "<think></think>"


def text_with(template: str) -> ModelText:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ModelText(tokenizer, (1, END))


def test_a_template_that_changes_replies_is_refused():
    shouting = text_with(TEMPLATE.replace("{{ m.content }}{% endif %}", "{{ m.content | upper }}{% endif %}"))
    with pytest.raises(TemplateError, match="does not write what a reply says as it stands"):
        shouting.frame.check()
    refusing = text_with("{{ raise_exception('only roses') }}")
    with pytest.raises(TemplateError, match="the chat template: only roses"):
        refusing.frame.check()


@pytest.mark.parametrize("option", ["tokenize", "chat_template", "add_generation_prompt", "return_dict"])
def test_options_of_the_template_are_not_those_of_the_library(option):
    with pytest.raises(TemplateError, match=f"{option} of chat_template_kwargs is not an option of the template"):
        model_text().frame.opening([{"role": "user", "content": "q"}], None, {option: True})


# --- conversations


def digest(*messages: dict) -> bytes:
    return digests(read_messages(messages), frame_digest(None, {}))[-1]


def test_what_a_client_makes_of_a_reply_is_still_that_reply():
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    spelt = {**CALL, "function": {"name": "calc", "arguments": '{ "x":1 }'}}
    as_dumped = {**reply, "content": " ", "tool_calls": [spelt], "refusal": None, "annotations": [], "audio": None}
    assert digest(reply) == digest(as_dumped)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert digest(parts) == digest({"role": "user", "content": "a b"})
    different = [
        reply,
        {**reply, "content": "x"},
        {**reply, "tool_calls": [{**CALL, "function": {"name": "calc", "arguments": '{"x": 2}'}}]},
        {"role": "user", "content": ""},
        {"role": "user", "content": " "},
        {"role": "tool", "content": "", "tool_call_id": "a"},
        {"role": "tool", "content": "", "tool_call_id": "b"},
    ]
    assert len({digest(each) for each in different}) == len(different)
    assert digest({"role": "user", "content": "ab"}) != digest(
        {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    )
    frames = {
        frame_digest(tools, options) for tools, options in itertools.product((None, [CALL]), ({}, {"quiet": True}))
    }
    assert len(frames) == 4


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "wizard", "content": "x"}], "must be one of assistant, developer, system, tool, user"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content must be text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of type 'text' can be read"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], r"tool_calls\[0\] must have a function with a name"),
    ],
)
def test_malformed_messages_are_named(messages, told):
    with pytest.raises(ConversationError, match=told):
        read_messages(messages)


# --- replies

PIECES = st.lists(
    st.sampled_from(["a", "é", "STOP", "ST", "<tool_call>", "<tool", "</tool_call>", '{"name": "f"}', "日"]), max_size=8
)


@given(pieces=PIECES, cuts=st.lists(st.integers(1, 5), min_size=1), stops=st.booleans(), calls=st.booleans())
@settings(deadline=None)
def test_what_is_told_in_parts_is_what_is_told_at_the_end(pieces, cuts, stops, calls):
    """However the tokens are cut into parts, in the middle of a character too. Reference: the reply told at once."""
    text = "".join(pieces)
    tokens = ids(text)
    asked = {"stops": ("STOP",) if stops else (), "reads_calls": calls}
    reply = Reply(model_text().decode, **asked, step=model_text().steps())
    told, at, cut = [], 0, itertools.cycle(cuts)
    stopped = False
    while at < len(tokens) and not stopped:
        size = next(cut)
        stopped = reply.take(tokens[at : at + size])
        told += reply.tell()
        assert "�" not in str(told)
        at += size
    told += reply.end()
    assert reply.tokens == tokens[:at], "tokens are never cut"
    assert stopped == (stops and "STOP" in text)
    whole = Reply(model_text().decode, **asked)
    assert whole.take(reply.tokens) == stopped
    assert [joined(told), reply.calls] == [joined(whole.end()), whole.calls]
    assert reply.text == whole.text == "".join(each for each in told if isinstance(each, str))
    assert reply.malformed_call == whole.malformed_call == (calls and OPEN in whole.text)
    if not calls:
        assert whole.text == (text.partition("STOP")[0] if stops else text)


def joined(pieces: list) -> list:
    """Calls, and the text between them in one."""
    found: list = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@given(tokens=st.lists(st.integers(0, 300), max_size=40))
@settings(deadline=None)
def test_bytes_that_are_no_characters_are_told_too_and_the_same_at_once_or_token_by_token(tokens):
    told, whole = (Reply(model_text().decode, step=step) for step in (model_text().steps(), None))
    pieces = []
    for token in tokens:
        told.take([token])
        pieces += told.tell()
    pieces += told.end()
    whole.take(tokens)
    assert ["".join(pieces)] == ["".join(whole.end())] == [model_text().decode(tokens)]


def test_tool_calls_are_told_as_they_end_and_from_a_malformed_one_on_all_is_text():
    two = 'See.<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    for malformed in ("", "<tool_call>{", "<tool_call>[]</tool_call>", '<tool_call>{"name": 1}</tool_call> so', OPEN):
        reply = Reply(model_text().decode, reads_calls=True, call_prefix="call_x_", step=model_text().steps())
        told = []
        for token in ids(two):
            reply.take([token])
            told += reply.tell()
        assert [each if isinstance(each, str) else each["function"] for each in joined(told)] == [
            "See.",
            {"name": "f", "arguments": '{"a":"é"}'},
            "\n",
            {"name": "g", "arguments": "{}"},
        ]
        assert [call["id"] for call in reply.calls] == ["call_x_0", "call_x_1"]
        reply.take(ids(malformed))
        assert "".join(reply.end()) == malformed
        assert (reply.malformed_call, reply.text) == (bool(malformed), f"See.\n{malformed}")


# --- requests

CHAT = {"messages": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 50),
        ("min_p", 0.1),
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 10}),
        ("response_format", {"type": "json_object"}),
        ("regex", "a+"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("top_logprobs", 3),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("max_tokens", 0),
    ],
)
def test_m3_what_would_sample_from_another_distribution_is_refused_by_name(field, value):
    body = read_body(msgspec.json.encode({**CHAT, field: value}), ChatBody)
    with pytest.raises(ApiError, match=field) as caught:
        read_chat(body, 1.0)
    assert (caught.value.status, caught.value.body()["error"]["type"]) == (400, "invalid_request_error")
    assert caught.value.body()["error"]["param"] == field


def test_requests_that_say_what_the_run_does_anyway_are_taken():
    neutral = {
        "temperature": 0.8,
        "top_p": 1,
        "n": 1,
        "top_k": -1,
        "presence_penalty": 0,
        "tool_choice": "auto",
        "user": "u",
    }
    wanted = read_chat(read_body(msgspec.json.encode({**CHAT, **neutral, "max_completion_tokens": 5}), ChatBody), 0.8)
    assert (wanted.max_tokens, wanted.stream, wanted.logprobs) == (5, False, False)
    body = read_body(b'{"prompt": [[5, 6]], "logprobs": 1, "stop": "x", "seed": 3}', CompletionBody)
    wanted, prompt = read_completion(body, 1.0)
    assert (prompt, wanted.max_tokens, wanted.stops, wanted.seed, wanted.logprobs) == ([5, 6], 16, ("x",), 3, True)
    wanted, prompt = read_generate(
        read_body(b'{"text": "x", "sampling_params": {"ignore_eos": true}}', GenerateBody), 1.0
    )
    assert (prompt, wanted.max_tokens, wanted.engine_params) == ("x", 128, {"ignore_eos": True})


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, b"{", None),
        (ChatBody, b'{"messages": "x"}', "messages"),
        (ChatBody, b'{"messages": [], "max_tokens": "7"}', "max_tokens"),
        (CompletionBody, b'{"prompt": ["a", "b"]}', "prompt"),
        (CompletionBody, b'{"prompt": "a", "echo": true}', "echo"),
        (CompletionBody, b'{"prompt": "a", "best_of": 2}', "best_of"),
        (CompletionBody, b'{"prompt": [-1]}', "prompt"),
        (GenerateBody, b'{"text": "a", "input_ids": [1]}', "input_ids"),
        (GenerateBody, b'{"text": "a", "sampling_params": {"temperature": 0}}', "sampling_params.temperature"),
        (GenerateBody, b'{"text": "a", "sampling_params": {"top_k": 1}}', "sampling_params"),
        (GenerateBody, b'{"text": "a", "return_hidden_states": true}', None),
    ],
)
def test_malformed_requests_are_refused(kind, body, param):
    readers = {ChatBody: read_chat, CompletionBody: read_completion, GenerateBody: read_generate}
    with pytest.raises(ApiError) as caught:
        readers[kind](read_body(body, kind), 1.0)
    assert (caught.value.status, caught.value.param) == (400, param)
