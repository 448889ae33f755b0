"""The way of one process into the sandbox, up to the foreign program.

Flows in: a `Way`, made before the process; the go-ahead on a pipe. Flows out: nothing, or one line on the fault pipe,
which closes when the program takes over.
"""

import ctypes
import os
import resource
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from slimerl.rewards.sandbox.namespaces import PROGRAM_DIRECTORY, enter_new_root
from slimerl.rewards.sandbox.system_calls import refuse_dangerous_calls

STDIN = "stdin"
USER = 1000
"""Of the program, inside."""
CHANNEL = 3
"""File descriptor of the program's connection to whoever runs it, where it has one."""
_FAULTS, _GO = 4, 5
_OPEN_FILES = 64
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """What one program may take. Memory is of each of its processes, CPU seconds too; `wall_s` ends them all."""

    cpu_s: int
    wall_s: float
    memory_bytes: int
    processes: int
    """Processes and threads, at one time."""
    output_bytes: int
    """Printed, standard output and standard error together."""
    files_bytes: int
    """In its working directory, altogether and each."""


@dataclass(frozen=True)
class Way:
    """Everything that the process needs on its way; descriptors are its own."""

    command: Sequence[str]
    shown: Sequence[str]
    files: dict[str, bytes]
    """In PROGRAM_DIRECTORY; STDIN, which becomes the standard input, among them."""
    limits: Limits
    go: int
    faults: int
    output: tuple[int, int]
    """Standard output, standard error."""
    channel: int | None
    is_root: bool
    """Outside: then it starts as root of its namespace."""


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def enter_and_run(way: Way) -> None:
    """Never returns."""
    try:
        # Nothing before the go-ahead: until then the process has no user id that counts.
        if os.read(way.go, 1):
            enter_new_root(way.shown, way.files, way.limits.files_bytes)
            _arrange_descriptors(way)
            os.setsid()
            _limit(way.limits)
            _become_nobody(way.is_root)
            _end_with_parent()
            refuse_dangerous_calls()
            os.execve(way.command[0], list(way.command), ENVIRONMENT)
    except BaseException as error:  # noqa: BLE001 - a forked process: it must not go on as its parent would
        os.write(way.faults, f"{type(error).__name__}: {error}".encode()[:1000])
    finally:
        os._exit(1)


def _arrange_descriptors(way: Way) -> None:
    """Standard ones, the channel, and nothing of what this process has inherited."""
    stdin = os.open(f"{PROGRAM_DIRECTORY}/{STDIN}", os.O_RDONLY)
    high = [os.dup(each) for each in (stdin, *way.output, way.channel or stdin, way.faults, way.go)]
    # Above all targets, so that none is overwritten before it is used.
    while min(high) <= _GO:
        high = [os.dup(descriptor) for descriptor in high]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=target < CHANNEL or (target == CHANNEL and way.channel is not None))
    os.closerange(_GO + 1, 1 << 20)


def _limit(limits: Limits) -> None:
    def at_most(kind: int, value: int) -> None:
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CPU, limits.cpu_s)
    at_most(resource.RLIMIT_AS, limits.memory_bytes)
    at_most(resource.RLIMIT_FSIZE, limits.files_bytes)
    at_most(resource.RLIMIT_NOFILE, _OPEN_FILES)
    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_MEMLOCK, 0)
    at_most(resource.RLIMIT_MSGQUEUE, 0)
    at_most(resource.RLIMIT_NPROC, limits.processes)


def _become_nobody(is_root: bool) -> None:
    """Without this user's rights outside and, from `execve` on, without capabilities inside."""
    if is_root:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)


def _end_with_parent() -> None:
    """After the change of user, which would undo it. The parent is invisible from here but for its end of a pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    ready = select.poll()
    ready.register(_GO, select.POLLHUP)
    if ready.poll(0):
        os._exit(1)
