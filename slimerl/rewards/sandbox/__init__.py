"""Foreign programs in a place of their own: `execution.py` runs one, `inside.py` is the way in, `namespaces.py` and
`system_calls.py` the kernel's part of it.

Flows in: a program and what it reads. Flows out: what it printed and how it ended.
Invariants: each program gets user, network, mount, process and IPC namespaces of its own, an empty writable directory,
a read-only view of the interpreter and nothing else; when `execute` returns, no process of it is left.
"""

from slimerl.rewards.sandbox.execution import Ending, Execution, Limits, Program, SandboxError, execute, probe

__all__ = ["Ending", "Execution", "Limits", "Program", "SandboxError", "execute", "probe"]
