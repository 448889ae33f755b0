"""Calls in the text of a policy, and answers in the frame of a chat template."""

import json

import pytest

from slimerl.environments.calls import UNREADABLE, ToolAnswer, ToolCall, ToolDescription
from slimerl.rollout.agents.chat_frames import ChatFrames, NoFrame
from slimerl.rollout.agents.formats import HermesFormat, PlainFormat
from slimerl.rollout.agents.texts import Foreign

TOOLS = [ToolDescription("calc", "expression", ""), ToolDescription("python", "code", "")]


def hermes() -> HermesFormat:
    return HermesFormat.of(TOOLS, lambda count: ["<before>", *["<between>"] * (count - 1), "<behind>"])


def call(**body: object) -> str:
    return f"<tool_call>\n{json.dumps(body)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("calc(12+34)=", [ToolCall("calc", "12+34")]),
        ("I think calc((1+2)*3)= \n", [ToolCall("calc", "(1+2)*3")]),
        ("calc(1)=calc(2)=", [ToolCall("calc", "1)=calc(2")]),
        ("calc(12+34)", []),
        ("calc(12+34)=46", []),
        ("46", []),
        ("", []),
    ],
)
def test_a_plain_call_stands_at_the_end_of_a_turn(text, calls):
    assert PlainFormat().calls(text) == calls


def test_hermes_calls_are_json_in_tags_any_number_of_them():
    text = "Let me see. " + call(name="calc", arguments={"expression": "1+1"}) + "\n"
    text += call(name="python", arguments={"code": "print('<tool_call>'[0])"}).replace("<tool_call>'", "x'")
    assert hermes().calls(text) == [ToolCall("calc", "1+1"), ToolCall("python", "print('x'[0])")]
    assert hermes().calls("The answer is 2.") == []
    assert hermes().calls(call(name="calc", arguments={"expression": 12})) == [ToolCall("calc", "12")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>\n{", "ends with </tool_call>"),
        ("<tool_call>\nnonsense\n</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        (call(arguments={}), "a call is"),
        (call(name="calc", arguments={"e": "1"}), "arguments of calc are"),
        (call(name="calc", arguments="1"), "arguments of calc are"),
        (call(name="calc", arguments={"expression": ["1"]}), "expression is a text"),
    ],
)
def test_a_hermes_call_that_cannot_be_read_is_answered_with_what_is_wrong(text, told):
    (answer,) = hermes().calls(text)
    assert isinstance(answer, ToolAnswer)
    assert answer.failure == UNREADABLE
    assert told in answer.text


def test_answers_stand_in_their_frame_and_are_foreign():
    assert PlainFormat().frame(["46"]) == [Foreign("46"), "\n"]
    assert hermes().frame(["1", "2"]) == ["<before>", Foreign("1"), "<between>", Foreign("2"), "<behind>"]


def qwen(messages: list[dict[str, str]]) -> str:
    """As Qwen3's template writes it: answers of tools are in one user turn."""
    text = ""
    for place, message in enumerate(messages):
        if message["role"] != "tool":
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            continue
        text += "<|im_start|>user" if messages[place - 1]["role"] != "tool" else ""
        text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
        text += "<|im_end|>\n" if messages[place + 1 : place + 2] == [] else ""
    return text + "<|im_start|>assistant\n"


def test_the_frame_is_what_the_chat_template_writes_around_answers():
    frames = ChatFrames(qwen, ["<|endoftext|>", "<|im_end|>"], "tool")
    open_, close = "\n<tool_response>\n", "\n</tool_response>"
    end = f"{close}<|im_end|>\n<|im_start|>assistant\n"
    assert frames.around(1) == (f"\n<|im_start|>user{open_}", end)
    assert frames.around(2) == (f"\n<|im_start|>user{open_}", f"{close}{open_}", end)
    question = {"role": "user", "content": "1+1?"}
    said = {"role": "assistant", "content": "calc"}
    asked = qwen([question])
    rendered = qwen([question, said, {"role": "tool", "content": "2"}])
    assert asked + "calc<|im_end|>" + "2".join(frames.around(1)) == rendered


def test_a_template_without_answers_of_tools_is_refused():
    def refuses(messages):
        raise ValueError("conversation roles must alternate")

    with pytest.raises(NoFrame, match="roles must alternate"):
        ChatFrames(refuses, [], "tool")
    with pytest.raises(NoFrame, match="does not write out messages of the role 'tool'"):
        ChatFrames(lambda messages: "".join(m["content"] for m in messages if m["role"] != "tool"), [], "tool")
