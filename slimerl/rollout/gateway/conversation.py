"""What a chat request goes on with: messages in one form, and digests by which they are found again. Pure.

Flows in: messages as OpenAI clients send them. Flows out: messages as chat templates want them, and one digest for each
prefix of a conversation.
Invariants: two conversations have the same digest where a client would call them the same: absent and empty fields,
the spelling of a tool call's JSON and white space around a reply make no difference, and everything else does; a digest
tells of tools and template options, too. Conversations are compared by messages, never by their rendered text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

Message = dict[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ENCODER = msgspec.json.Encoder(order="sorted")


class ConversationError(ValueError):
    """The messages of a request are not a conversation. `param`: the field at fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


def read_messages(raw: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check messages and bring them into the form that chat templates know.

    Returns:
        Messages with `content` as text, without absent fields, the arguments of tool calls as objects where they are
        JSON.

    Raises:
        ConversationError: none at all, an unknown role, content that is not text, or a malformed tool call.
    """
    if not raw:
        raise ConversationError("messages is empty: a conversation needs at least one")
    return [_read(message, f"messages[{place}]") for place, message in enumerate(raw)]


def _read(raw: Mapping[str, Any], where: str) -> Message:
    role = raw.get("role")
    if role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise ConversationError(f"{where}.role is {role!r}; it must be one of {known}", f"{where}.role")
    message = {key: value for key, value in raw.items() if value is not None}
    # what OpenAI calls so since 2024; templates know it by its old name alone
    message["role"] = "system" if role == "developer" else role
    message["content"] = _text(raw.get("content"), f"{where}.content")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ConversationError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
        if not calls:
            del message["tool_calls"]
    return message


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConversationError(f"{where} must be text or a list of parts", where)
    texts = []
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ConversationError(f"{where}[{number}]: only parts of type 'text' can be read", where)
        texts.append(part["text"])
    # as SGLang joins them for templates that take text
    return " ".join(texts)


def _call(raw: object, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{where} must have a function with a name", where)
    arguments = function.get("arguments")
    return {
        "id": raw.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(arguments)},
    }


def _arguments(arguments: object) -> object:
    """Templates print objects as JSON, and text as it stands."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


def frame_digest(tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]) -> bytes:
    """Of what stands around a conversation: the tools that it may use, and options of the chat template."""
    return xxhash.xxh3_128_digest(_ENCODER.encode((list(tools or ()), dict(options))))


def digests(messages: Sequence[Message], before: bytes) -> list[bytes]:
    """One per message, of the conversation up to and with it; `before`: that of the frame, or of a conversation."""
    found = []
    for message in messages:
        before = xxhash.xxh3_128_digest(before + _ENCODER.encode(_said(message)))
        found.append(before)
    return found


def _said(message: Message) -> object:
    """What makes a message another one."""
    if message["role"] != "assistant":
        return message
    # Clients return replies with fields of their own, and without white space at the ends.
    return ("assistant", message["content"].strip(), message.get("tool_calls", ()))
