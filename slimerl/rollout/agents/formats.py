"""How a policy writes calls of tools, and how it is shown their answers. Pure.

Flows in: the text of one turn; answers. Flows out: the calls in it; pieces of text to observe.

Two formats:

    hermes   <tool_call>
             {"name": "calc", "arguments": {"expression": "12+34"}}
             </tool_call>
             any number of them in a turn, as Hermes and Qwen models write it; the answers are framed by the tokenizer's
             chat template, as messages of the role `tool`, in the order of the calls
    plain    calc(12+34)=
             at the end of a turn, for models of few characters; the answer follows with a line end
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slimerl.environments.calls import UNREADABLE, ToolAnswer, ToolCall, ToolDescription, misused
from slimerl.rollout.agents.texts import Foreign, Piece


class ToolFormat(Protocol):
    def calls(self, text: str) -> list[ToolCall | ToolAnswer]:
        """What the turn asks for, in order; for a call that cannot be read, the answer to it. Empty: it asks for
        nothing."""
        ...

    def frame(self, answers: Sequence[str]) -> list[Piece]:
        """What the policy observes after a turn with so many calls."""
        ...


_PLAIN = re.compile(r"(?:^|[^A-Za-z0-9_])([A-Za-z_]\w*)\((.*)\)=\s*$", re.DOTALL)


class PlainFormat:
    def calls(self, text: str) -> list[ToolCall | ToolAnswer]:
        found = _PLAIN.search(text)
        return [ToolCall(found[1], found[2])] if found else []

    def frame(self, answers: Sequence[str]) -> list[Piece]:
        return [piece for answer in answers for piece in (Foreign(answer), "\n")]


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class HermesFormat:
    """`framed`: pieces of text around so many answers, one more than there are; see `chat_frames`."""

    parameters: Mapping[str, str]
    """Of each tool, by name."""
    framed: Callable[[int], Sequence[str]]

    @staticmethod
    def of(tools: Sequence[ToolDescription], framed: Callable[[int], Sequence[str]]) -> "HermesFormat":
        return HermesFormat({tool.name: tool.parameter for tool in tools}, framed)

    def calls(self, text: str) -> list[ToolCall | ToolAnswer]:
        found: list[ToolCall | ToolAnswer] = []
        for part in text.split(_OPEN)[1:]:
            body, closed, _ = part.partition(_CLOSE)
            found.append(self._call(body) if closed else misused(UNREADABLE, f"a call ends with {_CLOSE}"))
        return found

    def frame(self, answers: Sequence[str]) -> list[Piece]:
        first, *following = self.framed(len(answers))
        pieces: list[Piece] = [first]
        for answer, text in zip(answers, following, strict=True):
            pieces += [Foreign(answer), text]
        return pieces

    def _call(self, body: str) -> ToolCall | ToolAnswer:
        try:
            tree: Any = json.loads(body)
        except (json.JSONDecodeError, RecursionError):
            return misused(UNREADABLE, "the call is not valid JSON")
        if not isinstance(tree, dict) or not isinstance(name := tree.get("name"), str):
            return misused(UNREADABLE, 'a call is {"name": …, "arguments": {…}}')
        wanted = self.parameters.get(name)
        arguments = tree.get("arguments")
        if wanted is None:
            return ToolCall(name, "")
        if not isinstance(arguments, dict) or list(arguments) != [wanted]:
            return misused(UNREADABLE, f'the arguments of {name} are {{"{wanted}": …}}')
        value = arguments[wanted]
        if isinstance(value, dict | list | bool) or value is None:
            return misused(UNREADABLE, f"{wanted} is a text")
        return ToolCall(name, str(value))
