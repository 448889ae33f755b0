"""A worker's part of the tools: `slimerl.rewards.worker` calls what `scorer` makes.

Flows in: `ToolCall`s in msgpack. Flows out: `ToolAnswer`s in msgpack; `Failed` where the tool itself failed.
"""

from collections.abc import Callable, Sequence

import msgspec

from slimerl.environments import calculator, python_tool
from slimerl.environments.calls import ToolAnswer, ToolCall, ToolDescription, ToolMisused, misused
from slimerl.rewards.outcome import Failed
from slimerl.rewards.sandbox import Limits, SandboxError, probe
from slimerl.spec.functions import load_function

PARAMETERS = ("argument",)
"""(argument: str) → str. What it raises is told to the policy."""
LEFT_OUT = " … "

Tool = Callable[[str], ToolAnswer]


def describe(tool: str) -> ToolDescription:
    """Of a built-in tool, or a function of the user's with its docstring. Raises CustomFunctionError."""
    if tool == "calc":
        return calculator.DESCRIPTION
    if tool == "python":
        return python_tool.DESCRIPTION
    function = load_function(tool, PARAMETERS, "agent.tools")
    return ToolDescription(tool.rpartition(":")[2], PARAMETERS[0], " ".join((function.__doc__ or "").split()))


def scorer(tools: Sequence[str], output_characters: int, limits: dict) -> Callable[[bytes], bytes | Failed]:
    """Raises SandboxError, CustomFunctionError."""
    by_name = {describe(tool).name: _tool(tool, Limits(**limits)) for tool in tools}

    def call(body: bytes) -> bytes | Failed:
        request = msgspec.msgpack.decode(body, type=ToolCall)
        try:
            answer = by_name[request.name](request.argument)
        except ToolMisused as error:
            answer = misused(error.failure, str(error))
        except SandboxError as error:
            return Failed("sandbox", str(error))
        except _BadReturn as error:
            return Failed("bad_return", str(error))
        return msgspec.msgpack.encode(ToolAnswer(shortened(answer.text, output_characters), answer.failure))

    return call


def shortened(text: str, characters: int) -> str:
    """The middle of a longer text is left out: what matters stands at the beginning, or, of an error, at the end."""
    if len(text) <= characters:
        return text
    kept = max(0, characters - len(LEFT_OUT))
    return text[: kept - kept // 2] + LEFT_OUT[: characters - kept] + text[len(text) - kept // 2 :]


class _BadReturn(TypeError):
    """A function of the user's gave no text."""


def _tool(tool: str, limits: Limits) -> Tool:
    if tool == "calc":
        return lambda argument: ToolAnswer(calculator.calculate(argument))
    if tool == "python":
        trouble = probe()
        if trouble is not None:
            raise SandboxError(trouble)
        return lambda argument: python_tool.run_program(argument, limits)
    function = load_function(tool, PARAMETERS, "agent.tools")

    def called(argument: str) -> ToolAnswer:
        try:
            text = function(argument)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise ToolMisused("raised", f"{type(error).__name__}: {error}"[:1000]) from error
        if not isinstance(text, str):
            raise _BadReturn(f"{tool} gave {type(text).__name__}, not text")
        return ToolAnswer(text)

    return called
