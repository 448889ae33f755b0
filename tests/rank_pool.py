"""Up to four processes that stay alive for a test session and run functions as ranks of a fresh process group.

Flows in: a function that can be pickled (defined at the top of a module) and its arguments. Flows out: its result on
every rank. Invariant: a call returns within its deadline; if a rank raises or hangs, all ranks are killed and the
error says which rank, where. Each call has a process group of its own; parallel state never leaks between calls.
"""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slimerl.resilience.deadline import Deadline
from slimerl.resilience.imports import without_collections
from slimerl.resilience.processes import die_with_parent

MAX_RANKS = 4
START_S = 120.0
CALL_S = 150.0
STRAGGLER_S = 2.0
"""After one rank has raised, how long the others may still answer; they often wait for it in a collective."""


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class RankPool:
    """`pool.run(2, function, *args)` → [result of rank 0, result of rank 1]."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._calls = 0

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, deadline_s: float = CALL_S) -> list[Any]:
        """Call `function(*args)` on `ranks` processes with torch.distributed initialised over gloo.

        Raises:
            RankFailed: names the rank and carries its traceback, or where each rank stood at the deadline.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"{ranks} ranks asked for, the pool has 1 to {MAX_RANKS}")
        self._start(ranks)
        self._calls += 1
        job = _Job(self._calls, ranks, self._store.port, deadline_s, sys.path, pickle.dumps((function, args)))
        for rank in self._ranks[:ranks]:
            rank.connection.send(job)
        return self._answers(ranks, Deadline(f"{ranks} ranks to run {function.__qualname__}", deadline_s))

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def _start(self, ranks: int) -> None:
        import torch.distributed as dist

        if self._store is None:
            wait_s = datetime.timedelta(seconds=START_S)
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait_s)
        started = [_Rank.spawn(self._context, index) for index in range(len(self._ranks), ranks)]
        self._ranks += started
        deadline = Deadline("rank processes to start", START_S)
        for rank in started:
            if not rank.connection.poll(deadline.remaining_s):
                self.close()
                deadline.check()
            rank.connection.recv()

    def _answers(self, ranks: int, deadline: Deadline) -> list[Any]:
        waiting = {self._ranks[rank].connection: rank for rank in range(ranks)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), deadline.remaining_s)):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    succeeded, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, f"the process ended (exit code {self._ranks[rank].exit_code()})"
                (results if succeeded else errors)[rank] = value
                if not succeeded:
                    deadline = Deadline("the other ranks", min(STRAGGLER_S, deadline.remaining_s))
        if not errors and not waiting:
            return [results[rank] for rank in range(ranks)]
        stacks = {rank: self._ranks[rank].stack() for rank in waiting.values()}
        self.close()
        told = [f"rank {rank} failed:\n{error}" for rank, error in sorted(errors.items())]
        told += [f"rank {rank} has not answered; it stood at:\n{stack}" for rank, stack in sorted(stacks.items())]
        raise RankFailed(f"{deadline.what}\n" + "\n".join(told))


@dataclass(frozen=True)
class _Job:
    call: int
    ranks: int
    port: int
    deadline_s: float
    path: list[str]
    payload: bytes
    """Function and arguments, pickled apart: the rank takes over `path` before it imports the function's module."""


class _Rank:
    def __init__(self, process: Any, connection: Connection, stack_file: Path) -> None:
        self.process, self.connection, self.stack_file = process, connection, stack_file

    @staticmethod
    def spawn(context: Any, index: int) -> "_Rank":
        ours, theirs = context.Pipe()
        stack_file = Path(tempfile.mkstemp(prefix=f"rank{index}-", suffix=".stack")[1])
        process = context.Process(target=_serve, args=(theirs, index, os.getpid(), str(stack_file)), daemon=True)
        process.start()
        theirs.close()
        return _Rank(process, ours, stack_file)

    def exit_code(self) -> int | None:
        self.process.join(1)
        return self.process.exitcode

    def stack(self) -> str:
        """Where the process stands; it writes that itself on SIGUSR1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        written = Deadline("a rank to write where it stands", 1)
        while not self.stack_file.read_text() and written.remaining_s:
            self.process.join(0.05)
        return self.stack_file.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stack_file.unlink(missing_ok=True)


def _serve(connection: Connection, index: int, parent: int, stack_file: str) -> None:
    die_with_parent(parent)
    faulthandler.register(signal.SIGUSR1, file=open(stack_file, "w"))  # noqa: SIM115 (open as long as the process)
    # Megatron warns about each CUDA extension that is missing
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    connection.send("started")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, _run(job, index))
        except Exception:  # noqa: BLE001 (every failure is told to the test)
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _run(job: _Job, index: int) -> Any:
    import torch.distributed as dist

    sys.path[:] = job.path
    with without_collections():
        function, args = pickle.loads(job.payload)
    modules = len(sys.modules)
    timeout = datetime.timedelta(seconds=job.deadline_s)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    own = dist.PrefixStore(f"call{job.call}", store)
    dist.init_process_group("gloo", store=own, rank=index, world_size=job.ranks, timeout=timeout)
    environment = dict(os.environ)
    try:
        return function(*args)
    finally:
        # Megatron chooses attention kernels through the environment, and refuses to choose otherwise later.
        os.environ.clear()
        os.environ.update(environment)
        _forget_wrapped_models()
        _forget_groups()
        if len(sys.modules) > modules:
            gc.freeze()  # what imports have made lives on; to look through it takes longer than many a test


def _forget_wrapped_models() -> None:
    """Megatron's data-parallel wrapper and the gradient accumulators that it hooks hold each other across C++, where
    Python's collector does not see it. With all that the wrapper holds, some 50 gloo threads of a call would stay, and
    busy ones; an empty wrapper may."""
    if distributed := sys.modules.get("megatron.core.distributed"):
        gc.collect()
        for found in gc.get_objects():
            if isinstance(found, distributed.DistributedDataParallel):
                vars(found).clear()
        gc.collect()


def _forget_groups() -> None:
    import torch.distributed as dist

    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
