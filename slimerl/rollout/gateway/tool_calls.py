"""Tool calls in a reply's text, in the form that Qwen and Hermes models are trained to write. Pure.

Flows in: text with `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Flows out: the text around the calls, and
the calls as OpenAI clients read them.
Invariant: a reply with a call that cannot be read has no calls: all of its text is told as it is.
"""

import re
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


def split_calls(text: str, prefix: str) -> tuple[str, list[dict[str, Any]]] | None:
    """The text outside of calls, and the calls.

    Args:
        prefix: of the calls' ids, unique in the conversation.

    Returns:
        None where some call is malformed: no object with a name, or cut off.
    """
    calls: list[dict[str, Any]] = []
    for found in _CALL.finditer(text):
        call = _parsed(found.group(1))
        if call is None or not found.group(0).endswith(CLOSE):
            return None
        name, arguments = call
        calls.append({"id": f"{prefix}{len(calls)}", "type": "function", "function": _function(name, arguments)})
    return _CALL.sub("", text), calls


def _function(name: str, arguments: object) -> dict[str, str]:
    return {"name": name, "arguments": arguments if isinstance(arguments, str) else _json(arguments)}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _parsed(text: str) -> tuple[str, object] | None:
    try:
        call = msgspec.json.decode(text.strip())
    except msgspec.DecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return call["name"], call.get("arguments", {})


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of a text that goes on may be the beginning of a marker: they are not told yet."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
