"""`python -m slimerl.resilience.tied PARENT_PID COMMAND…`: become COMMAND, killed by the kernel when the parent ends.

For programs that cannot tie their own life to their parent's (torchrun, SGLang): the tie survives the exec.
"""

import os
import sys

from slimerl.resilience.processes import die_with_parent


def tied_command(command: list[str]) -> list[str]:
    """`command` as a child of this very process that never outlives it."""
    return [sys.executable, "-m", "slimerl.resilience.tied", str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
