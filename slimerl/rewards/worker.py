"""One reward worker: `python -m slimerl.rewards.worker PARENT_PID SOCKET_FD JOB`, the last a `Job` in JSON.

Flows in and out: frames on the socket, one task at a time. Standard input and output lead to /dev/null, so that
nothing a scorer prints reaches anyone. Time is not kept here: whoever waits kills this process.
Invariants: it dies with its parent; it takes no more memory than allowed; processes that a scorer leaves behind stay
its descendants (it is their subreaper), so that killing the family finds them all.
"""

import ctypes
import importlib
import math
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from slimerl.resilience.processes import die_with_parent
from slimerl.rewards.frames import Job, Ready, Reply, Task, Verdict, pack, receive_frame
from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored

_PR_SET_CHILD_SUBREAPER = 36
_FILE_BYTES = 2**20
_OPEN_FILES = 64

Scorer = Callable[[RewardRequest | bytes], Outcome | bytes]
"""Judges requests, or answers calls."""


def main(parent_pid: int, descriptor: int, job: Job) -> None:
    """Serve tasks until the socket closes or the worker is not fit for another."""
    die_with_parent(parent_pid)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stream = socket.socket(fileno=descriptor)
    try:
        scorer = load_scorer(job.scorer, job.options)
    except Exception as error:  # noqa: BLE001 - a module of the user's may raise anything; it is told and this ends
        stream.sendall(pack(Ready(f"cannot load {job.scorer}: {error}")))
        return
    if job.starts_programs:
        # Its own alone: the programs get theirs, which may be wider.
        resource.setrlimit(resource.RLIMIT_AS, (job.memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    else:
        _limit(job.memory_bytes)
    stream.sendall(pack(Ready()))
    while True:
        try:
            task = receive_frame(stream, Task)
        except EOFError:
            return
        outcome, fit = _score(scorer, task.request)
        retire = not fit or _has_children()
        stream.sendall(pack(Verdict(task.number, outcome, retire)))
        if retire:
            return


def load_scorer(path: str, options: dict[str, Any] | None = None) -> Scorer:
    """See `Job`. Raises what the module raises, ImportError, AttributeError or ValueError."""
    module, colon, function = path.partition(":")
    if not colon:
        raise ValueError("write a scorer as package.module:function")
    found = getattr(importlib.import_module(module), function)
    scorer: Scorer = found if options is None else found(**options)
    return scorer


def _limit(memory_bytes: int) -> None:
    """After the imports: loading a library may want threads, scoring does not."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # No process and no thread beyond this one. The kernel does not apply it to root: there `_has_children` and the
    # killing of the whole family stand alone.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _score(scorer: Scorer, request: RewardRequest | bytes) -> tuple[Outcome | Reply, bool]:
    """The outcome, and whether the worker can go on."""
    try:
        outcome = scorer(request)
    except MemoryError:
        return Failed("memory", "scoring took more memory than a worker may have"), False
    except RecursionError:
        return Failed("recursion", "scoring recursed too deeply"), False
    except Exception as error:  # noqa: BLE001 - whatever a scorer raises is an outcome of the sample
        return Failed("error", f"{type(error).__name__}: {error}"[:1000]), True
    if isinstance(request, bytes) and isinstance(outcome, bytes):
        return Reply(outcome), True
    if not isinstance(outcome, Outcome):
        return Failed("bad_return", f"the scorer gave {type(outcome).__name__}, not an Outcome"), True
    if isinstance(outcome, Scored) and not math.isfinite(outcome.reward):
        return Failed("not_finite", f"the reward is {outcome.reward}"), True
    return outcome, True


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Job))
