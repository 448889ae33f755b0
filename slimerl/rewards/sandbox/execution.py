"""Run one foreign Python program, watch it, and leave nothing of it.

Flows in: a `Program` and its `Limits`. Flows out: an `Execution`: what was printed, what was checked, how it ended.
Invariants: the program's fate is decided from outside (its exit, the kernel's limits, a clock here); at return its
process namespace is empty and every descriptor made for it is closed. The calling process must have one thread only.
"""

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from io import FileIO

from slimerl.rewards.sandbox import namespaces
from slimerl.rewards.sandbox.checks import CHECKS_RUNNER, CheckChannel
from slimerl.rewards.sandbox.inside import STDIN, USER, Limits, Way, enter_and_run
from slimerl.rewards.sandbox.namespaces import PROGRAM_DIRECTORY

_BLOCK = 2**16
_STDERR_BYTES = 4096
"""The end of standard error that is kept."""
SOURCE = "main.py"
_START_S = 10.0
"""From the new process to the program."""
REMEDY = (
    "let this user make namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --security-opt seccomp=unconfined), with Linux "
    "5.12 or newer"
)


class SandboxError(RuntimeError):
    """No program can be run here, or this one was not run; says nothing about the program."""


class Ending(StrEnum):
    """How a program ended; the first that applies."""

    OUTPUT_LIMIT = "output_limit"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    CRASHED = "crashed"
    """By a signal."""
    RAISED = "raised"
    """With an exit code other than 0."""
    WELL = "well"


@dataclass(frozen=True)
class Program:
    """Python source. With `checks` (statements such as `assert f(1) == 2`), each is run in the program's namespace
    after the program itself."""

    source: str
    stdin: bytes = b""
    checks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Execution:
    ending: Ending
    stdout: bytes
    stderr: bytes
    """The end of it."""
    passed: tuple[bool, ...] = ()
    """For each check that was reached."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


def probe() -> str | None:
    """Why no program can be run on this machine; None: it can. As `execute`, for a process with one thread."""
    limits = Limits(cpu_s=10, wall_s=30.0, memory_bytes=2**29, processes=4, output_bytes=2**16, files_bytes=2**20)
    try:
        execution = execute(Program("import socket\nprint('ok')"), limits)
    except SandboxError as error:
        return str(error)
    if execution.stdout == b"ok\n":
        return None
    return f"the sandbox's own test program {execution.ending}: {execution.stderr.decode(errors='replace')}"


def execute(program: Program, limits: Limits) -> Execution:
    """Raises SandboxError."""
    if not namespaces.supported():
        raise SandboxError("the sandbox knows Linux on x86-64 and aarch64 only")
    try:
        with ExitStack() as stack:
            return _Run(program, limits, stack).watch()
    except OSError as error:
        raise SandboxError(f"the machine refused something that a sandbox needs: {error}") from error


_COMMAND = (os.path.realpath(sys.executable), "-I", "-S", "-B", f"{PROGRAM_DIRECTORY}/{SOURCE}")
"""Isolated, without site-packages: a program sees the standard library."""


def _shown() -> list[str]:
    """Directories of the machine that a program sees."""
    shown = namespaces.system_directories()
    home = os.path.realpath(sys.base_prefix)
    return shown if any(home == path or home.startswith(f"{path}/") for path in shown) else [*shown, home]


@dataclass
class _Run:
    """One execution; whatever `stack` holds is gone at its end."""

    program: Program
    limits: Limits
    stack: ExitStack
    pid: int = 0
    _reaped: tuple[int, resource.struct_rusage] = field(init=False)

    def watch(self) -> Execution:
        begun = time.monotonic()
        ears = self._start()
        ended = self._listen(ears, begun + self.limits.wall_s)
        # Returns when the whole process namespace is empty: this process was its init.
        status, usage = self._kill()
        out, err = bytes(ears.printed[0]), bytes(ears.printed[1])
        ending = Ending.OUTPUT_LIMIT if ears.too_much else _ending(status, usage, ended, self.limits, err)
        return Execution(
            ending=ending,
            stdout=out[: self.limits.output_bytes],
            stderr=err[-_STDERR_BYTES:],
            passed=ears.channel.passed if ears.channel is not None else (),
            wall_s=time.monotonic() - begun,
            cpu_s=usage.ru_utime + usage.ru_stime,
        )

    def _listen(self, ears: "_Ears", until: float) -> bool:
        """True: the program's first process ended by itself."""
        pidfd = os.pidfd_open(self.pid)
        self.stack.callback(os.close, pidfd)
        while not ears.too_much and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            ears.register(poll)
            ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
            # Its end counts last: what it printed before has been heard by then.
            if ready == [pidfd]:
                return True
            ears.take(ready)
        return False

    def _start(self) -> "_Ears":
        (go, our_go), (our_faults, faults) = self._pipe(), self._pipe()
        (our_out, out), (our_err, err) = self._pipe(), self._pipe()
        channel = theirs = None
        source = self.program.source.encode("utf-8", "replace")
        if self.program.checks is not None:
            # The program itself goes through the channel.
            source = CHECKS_RUNNER.encode()
            ours, theirs = (self.stack.enter_context(end) for end in socket.socketpair())
            channel = CheckChannel(ours, self.program.source, self.program.checks)
        way = Way(
            command=_COMMAND,
            shown=_shown(),
            files={SOURCE: source, STDIN: self.program.stdin},
            limits=self.limits,
            go=go.fileno(),
            faults=faults.fileno(),
            output=(out.fileno(), err.fileno()),
            channel=theirs.fileno() if theirs is not None else None,
            is_root=os.geteuid() == 0,
        )
        self._clone(way, our_go)
        for end in (go, faults, out, err):
            end.close()
        if theirs is not None:
            theirs.close()
        self._send_off(our_go, our_faults)
        return _Ears((our_out, our_err), channel, self.limits.output_bytes)

    def _clone(self, way: Way, our_go: FileIO) -> None:
        try:
            self.pid = namespaces.clone(namespaces.NEW_NAMESPACES)
        except OSError as error:
            raise SandboxError(f"no new namespaces can be made here ({error}); {REMEDY}") from error
        if self.pid == 0:
            # Its own copy would keep the pipe open that tells it of this process's end.
            os.close(our_go.fileno())
            enter_and_run(way)
        self.stack.callback(self._kill)

    def _send_off(self, our_go: FileIO, our_faults: FileIO) -> None:
        try:
            namespaces.map_user(self.pid, USER)
            our_go.write(b"g")
        except OSError as error:
            raise SandboxError(f"a new user namespace gets no user ({error}); {REMEDY}") from error
        ready = select.poll()
        ready.register(our_faults, select.POLLIN)
        if not ready.poll(_START_S * 1000):
            raise SandboxError(f"a program's process was not ready within {_START_S:g} s")
        fault = (our_faults.read(_BLOCK) or b"").decode(errors="replace")
        if fault:
            raise SandboxError(f"a program's process could not be shut in ({fault}); {REMEDY}")

    def _kill(self) -> tuple[int, resource.struct_rusage]:
        """Kill and reap; a second time does nothing."""
        if not self.pid:
            return self._reaped
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        self.pid, self._reaped = 0, (status, usage)
        return self._reaped

    def _pipe(self) -> tuple[FileIO, FileIO]:
        read, write = os.pipe()
        return self.stack.enter_context(FileIO(read, "rb")), self.stack.enter_context(FileIO(write, "wb"))


@dataclass
class _Ears:
    """What is heard of a program: standard output, standard error, and its channel."""

    pipes: tuple[FileIO, FileIO]
    channel: CheckChannel | None
    output_bytes: int
    printed: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))

    @property
    def too_much(self) -> bool:
        return sum(map(len, self.printed)) > self.output_bytes

    def register(self, poll: select.poll) -> None:
        """Whatever is still open. A program may close its output and go on."""
        for pipe in self.pipes:
            if not pipe.closed:
                poll.register(pipe, select.POLLIN)
        if self.channel is not None and not self.channel.closed:
            poll.register(self.channel, self.channel.interest)

    def take(self, ready: Sequence[int]) -> None:
        for pipe, printed in zip(self.pipes, self.printed, strict=True):
            if not pipe.closed and pipe.fileno() in ready:
                part = pipe.read(_BLOCK)
                printed += part
                if not part:
                    pipe.close()
        if self.channel is not None and not self.channel.closed and self.channel.fileno() in ready:
            self.channel.serve()


def _ending(status: int, usage: resource.struct_rusage, ended: bool, limits: Limits, stderr: bytes) -> Ending:
    code = os.waitstatus_to_exitcode(status)
    # One second is the kernel's measure of the limit.
    out_of_cpu = code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime > limits.cpu_s - 1
    if not ended or out_of_cpu:
        return Ending.TIME_LIMIT
    if code and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return Ending.MEMORY_LIMIT
    if code < 0:
        return Ending.CRASHED
    return Ending.RAISED if code else Ending.WELL
