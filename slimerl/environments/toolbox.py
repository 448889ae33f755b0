"""Tools as the event loop has them.

Flows in: `ToolCall`s, many at once. Flows out: a `ToolAnswer` for each, or `Failed`.
"""

from collections.abc import Sequence

import msgspec

from slimerl.environments.calls import UNKNOWN_TOOL, ToolAnswer, ToolCall, ToolDescription, misused
from slimerl.environments.tool_worker import describe
from slimerl.rewards.outcome import Failed
from slimerl.rewards.pool import WorkerPool
from slimerl.spec.agent import ToolsAgent

_SCORER = "slimerl.environments.tool_worker:scorer"
_MIB = 2**20


class Toolbox:
    """`call` from `start` to `close`."""

    def __init__(self, pool: WorkerPool, descriptions: Sequence[ToolDescription]) -> None:
        self._pool = pool
        self.descriptions = tuple(descriptions)

    @staticmethod
    def of(spec: ToolsAgent) -> "Toolbox":
        """Raises CustomFunctionError."""
        limits = {
            "cpu_s": spec.python_cpu_s,
            "wall_s": spec.python_wall_s,
            "memory_bytes": spec.python_memory_mib * _MIB,
            "processes": spec.python_processes,
            # more than is shown of it, so that the end of what a program prints can be
            "output_bytes": max(_MIB, 8 * spec.output_characters),
            "files_bytes": 16 * _MIB,
        }
        options = {"tools": spec.tools, "output_characters": spec.output_characters, "limits": limits}
        runs_programs = "python" in spec.tools
        pool = WorkerPool(spec.workers, spec.timeout_s, _SCORER, options=options, starts_programs=runs_programs)
        return Toolbox(pool, [describe(tool) for tool in spec.tools])

    async def start(self) -> None:
        """Raises RewardUnavailable."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def call(self, call: ToolCall) -> ToolAnswer | Failed:
        """Failed: the tool failed, not the call."""
        names = [each.name for each in self.descriptions]
        if call.name not in names:
            return misused(UNKNOWN_TOOL, f"there is no tool '{call.name[:100]}'; there is {', '.join(names)}")
        answer = await self._pool.call(msgspec.msgpack.encode(call), f"a call of {call.name}")
        return answer if isinstance(answer, Failed) else msgspec.msgpack.decode(answer, type=ToolAnswer)
