"""Tool calls in a reply's text, in the form that Qwen and Hermes models are trained to write. Pure.

Flows in: what stands between `<tool_call>` and `</tool_call>`: `{"name": …, "arguments": {…}}`. Flows out: the call as
OpenAI clients read it.
"""

from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_call(text: str, call_id: str) -> dict[str, Any] | None:
    """The call; None: it is malformed, no object with a name. `call_id`: unique in the conversation."""
    call = _parsed(text)
    return call and {"id": call_id, "type": "function", "function": _function(*call)}


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
