"""Calls of tools, as they go to a worker and come back."""

from dataclasses import dataclass

import msgspec

UNREADABLE, UNKNOWN_TOOL = "unreadable", "unknown_tool"
"""Failures of calls that reach no tool."""


class ToolCall(msgspec.Struct, frozen=True):
    """Every tool takes one text."""

    name: str
    argument: str


class ToolAnswer(msgspec.Struct, frozen=True):
    """`text`: for the policy. `failure`: in one word, for counting, what was wrong with the call; empty: nothing."""

    text: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """What a policy is told of a tool."""

    name: str
    parameter: str
    description: str

    def schema(self) -> dict:
        """As chat templates take it: a function in JSON schema."""
        parameters = {
            "type": "object",
            "properties": {self.parameter: {"type": "string"}},
            "required": [self.parameter],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class ToolMisused(Exception):
    """The call is at fault, and the policy is told. `failure`: in one word, for counting."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


def misused(failure: str, detail: str) -> ToolAnswer:
    return ToolAnswer(f"error: {detail}", failure)
