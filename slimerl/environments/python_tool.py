"""The Python tool: a program of the policy's, run in the sandbox of the code rewards.

Flows in: source text. Flows out: what it printed; where it did not end well, why, and the end of its standard error.
"""

from slimerl.environments.calls import ToolAnswer, ToolDescription
from slimerl.rewards.sandbox import Ending, Limits, Program, execute

DESCRIPTION = ToolDescription(
    "python", "code", "Runs a Python program, standard library alone, and returns what it prints."
)
_NAMED = {
    Ending.OUTPUT_LIMIT: "it printed too much",
    Ending.TIME_LIMIT: "it took too long",
    Ending.MEMORY_LIMIT: "it took too much memory",
    Ending.CRASHED: "it crashed",
}
SILENT = "(it printed nothing)"


def run_program(source: str, limits: Limits) -> ToolAnswer:
    """Raises SandboxError: the sandbox failed, not the program."""
    execution = execute(Program(source), limits)
    printed = execution.stdout.decode(errors="replace").rstrip()
    if execution.ending is Ending.WELL:
        return ToolAnswer(printed or SILENT)
    told = _NAMED.get(execution.ending) or execution.stderr.decode(errors="replace").strip()
    return ToolAnswer(f"{printed}\nerror: {told}".lstrip(), execution.ending.value)
