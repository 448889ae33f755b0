"""`python -m slimerl.resilience.tied PARENT_PID COMMAND…`: become COMMAND, killed by the kernel when the parent ends.

For programs that cannot tie their own life to their parent's (torchrun, SGLang): the tie survives the exec. COMMAND's
own children find its process id in their environment (`tied_parent`), so that one that starts when COMMAND is gone
already does not take whoever adopted it for its parent.
"""

import os
import sys

from slimerl.resilience.processes import die_with_parent

TIED_PARENT = "SLIMERL_TIED_PARENT"


def tied_command(command: list[str]) -> list[str]:
    """`command` as a child of this very process that never outlives it."""
    return [sys.executable, "-m", "slimerl.resilience.tied", str(os.getpid()), *command]


def tied_parent() -> int:
    """The process whose end this one must not outlive: the tied command that started it, else its parent now."""
    return int(os.environ.get(TIED_PARENT, os.getppid()))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ[TIED_PARENT] = str(os.getpid())
    os.execvp(sys.argv[2], sys.argv[2:])
