"""The write of one checkpoint: planned by all ranks, written by a child of each, completed by the first.

Flows in: the state as Megatron's tree. Flows out: `step-N`, or `SaveFailed` on every rank alike.
Invariants: the children see the state as it was when they were forked, whatever the training does to it meanwhile;
whoever fails, on whatever rank, all ranks learn of it at the same place, and what was complete before stays.
"""

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import CheckpointException

from slimerl.resilience.deadline import Deadline
from slimerl.training.checkpoint import directory, plan
from slimerl.training.checkpoint.directory import Entry, Manifest

Answer = TypeVar("Answer")

POLL_S = 0.05
_FORMAT = ("torch_dist", 1)
_PR_SET_PDEATHSIG = 1
_UNKNOWN_STATUS = 255 << 8
FORKS, FORK_S = 5, 5.0
"""Tries, and the time of each for the child's first word."""
_STARTED = b"+"
_ERROR_BYTES = 4096
"""Of an error's text; a pipe takes so much at once."""


class SaveFailed(Exception):
    """A checkpoint was not written; the message says where and why. Raised on every rank."""


class Writing(ABC):
    """A save that is under way, to either tier. Every method is called on every rank."""

    def __init__(self, root: Path, step: int, device: torch.device) -> None:
        self.step, self._root, self._device = step, root, device
        self._child: Child | None = None
        self._begun = time.monotonic()

    def done(self) -> bool:
        """Have all ranks written their part?"""
        return all_ended(self._child, self._device)

    def kill(self) -> None:
        """End this rank's writer: whoever goes on in this process may write the same checkpoint."""
        if self._child is not None:
            self._child.kill()

    @abstractmethod
    def abandon(self) -> None:
        """End the writers and give the disk space back."""

    @contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        """What failed on all ranks is abandoned; what failed otherwise leaves at least no writer behind."""
        try:
            yield
        except SaveFailed:
            self.abandon()
            raise
        except BaseException:
            self.kill()
            raise


class Write(Writing):
    """One checkpoint under way. Every method is called on every rank.

    Megatron's own way waits without a bound for processes that may be gone, leaves a process behind when the trainer
    is killed, and hangs the other ranks when one cannot write.
    """

    def __init__(self, root: Path, step: int, tree: dict[str, Any], device: torch.device) -> None:
        """Plan it and start writing; returns as soon as the state may change again. Raises SaveFailed."""
        super().__init__(root, step, device)
        agreed(lambda: directory.start_partial(root, step) if dist.get_rank() == 0 else None, "start")
        self._partial = directory.partial_path(root, step)
        with self._given_up_on_failure():
            self._plan(tree)
            agreed(self._start_child, "start the writer of")

    def finish(
        self, deadline: Deadline, extra: Mapping[str, bytes], manifest: Callable[[dict[str, Entry]], Manifest]
    ) -> float:
        """Wait until all have written, then make it a checkpoint.

        Args:
            extra: further files, by name; of rank 0.
            manifest: of the files that it consists of.

        Returns:
            Seconds from the start to here.

        Raises:
            SaveFailed: nothing of it is left.
        """
        with self._given_up_on_failure():
            wait_until_ended(self._child, self._device, deadline)
            parts = _gathered(agreed(self._outcome, "write"))
            agreed(lambda: self._complete(parts, extra, manifest) if parts is not None else None, "complete")
        return time.monotonic() - self._begun

    def abandon(self) -> None:
        self.kill()
        dist.barrier()
        if dist.get_rank() == 0:
            directory.remove_partial(self._root, self.step)

    def _plan(self, tree: dict[str, Any]) -> None:
        sharded, common, self._common = agreed(lambda: plan.parts(tree), "prepare")
        agreed(lambda: plan.check(sharded, common), "check")
        state = agreed(lambda: plan.in_torch_format(sharded), "prepare")
        self._writer, self._index = agreed(lambda: plan.planned(state, self._partial), "plan")

    def _start_child(self) -> None:
        _, preload, _ = self._writer.get_save_function_and_args()
        if preload is None:
            return
        # on a GPU this is the copy to the host; elsewhere the fork is the snapshot
        buckets = preload()
        self._child = Child(lambda: _write_buckets(buckets, self._writer.transforms, self._outcome_file))

    @property
    def _outcome_file(self) -> Path:
        return self._partial / f".outcome-{dist.get_rank()}"

    def _outcome(self) -> "_Outcome":
        if self._child is None:
            return _Outcome([], {})
        self._child.check()
        outcome = pickle.loads(self._outcome_file.read_bytes())
        self._outcome_file.unlink()
        return outcome

    def _complete(
        self, parts: list["_Outcome"], extra: Mapping[str, bytes], manifest: Callable[[dict[str, Entry]], Manifest]
    ) -> None:
        """On rank 0: the small files, the manifest, the name."""
        self._writer.finish(self._index, [part.results for part in parts])
        backend, version = _FORMAT
        config = {"sharded_backend": backend, "sharded_backend_version": version}
        config |= {"common_backend": "torch", "common_backend_version": 1}
        small = {COMMON_STATE_FNAME: self._common, CONFIG_FNAME: json.dumps(config).encode(), **extra}
        for name, data in small.items():
            directory.write_flushed(self._partial / name, data)
        files = {name: entry for part in parts for name, entry in part.files.items()}
        # the small ones and Megatron's own index
        files |= {path.name: directory.entry_of(path) for path in self._partial.iterdir() if path.name not in files}
        directory.write_manifest(self._partial, manifest(files))
        directory.complete(self._root, self.step)


@dataclass(frozen=True)
class _Outcome:
    """What a rank has written: Megatron's records of it, and the files."""

    results: list[Any]
    files: dict[str, Entry]


class Child:
    """A forked process that runs `work` on the state as it is now, and ends with this one.

    CPython's own work after a fork waits for ever where another thread (of PyTorch, of gloo) was just beginning or
    ending to use Python in the parent; the child is then given up, and forked again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        """Raises OSError: it did not start."""
        self._error = -1
        for _ in range(FORKS):
            self._fork(work)
            if _said(self._error, FORK_S):
                os.read(self._error, len(_STARTED))
                return
            self.kill()
            os.close(self._error)
            self._error = -1
        raise OSError(f"a forked process did not start within {FORK_S:g} s, {FORKS} times in a row")

    def _fork(self, work: Callable[[], None]) -> None:
        self._status: int | None = None
        self._error, error = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(error)
            raise
        if self._pid == 0:
            _run_and_leave(work, error, parent)
        os.close(error)

    def is_running(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                # somebody else has asked for it, and how it ended is lost
                pid, status = self._pid, _UNKNOWN_STATUS
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is None

    def check(self) -> None:
        """Once it has ended: raises OSError with what it said if it did not succeed."""
        if self._status != 0:
            said = os.read(self._error, _ERROR_BYTES).decode(errors="replace")
            raise OSError(said or f"the writing process ended with {self._status}")

    def kill(self) -> None:
        if self.is_running():
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._status = -signal.SIGKILL

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._error)


def all_ended(child: Child | None, device: torch.device) -> bool:
    """Have the children of all ranks ended? Called on every rank; None: this one has none."""
    running = torch.tensor([int(child is not None and child.is_running())], device=device)
    dist.all_reduce(running)
    return int(running) == 0


def wait_until_ended(child: Child | None, device: torch.device, deadline: Deadline) -> None:
    """Until `all_ended`. Raises SaveFailed at the deadline."""
    while not all_ended(child, device):
        # every rank has the same opinion of the time only by chance, so one decides
        agreed(deadline.check if dist.get_rank() == 0 else (lambda: None), "write")
        time.sleep(POLL_S)


def _said(descriptor: int, timeout_s: float) -> bool:
    """Is there something to read, or its end, within that time? `select` takes no descriptor from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _run_and_leave(work: Callable[[], None], error: int, parent: int) -> None:
    """In the child: never returns, and touches nothing that belongs to the trainer (signals, buffers, GPU)."""
    code = 1
    try:
        os.write(error, _STARTED)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            work()
            code = 0
    except BaseException as fault:  # noqa: BLE001 - there is nobody above; the trainer is told
        told = _told_of_files(fault)
        os.write(error, f"{type(told).__name__}: {told}".encode()[:_ERROR_BYTES])
    finally:
        os._exit(code)


def _told_of_files(fault: BaseException) -> BaseException:
    """What the file system said; torch's writer covers it with a position in the file that it did not expect."""
    behind = fault.__context__
    return behind if isinstance(fault, RuntimeError) and isinstance(behind, OSError) else fault


def _write_buckets(buckets: list[Any], transforms: Any, outcome_file: Path) -> None:
    """Write this rank's files, read them back for their digests, and leave a note of both."""
    outcome = _Outcome([], {})
    queue = _Kept()
    for index, bucket in enumerate(buckets):
        path, name, _ = bucket
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            [transforms], index, bucket, queue, _NoCount(), use_fsync=True
        )
        result = queue.last
        if isinstance(result, Exception):
            raise result
        outcome.results.extend(result)
        outcome.files[name] = directory.entry_of(Path(path))
    directory.write_flushed(outcome_file, pickle.dumps(outcome))


class _Kept:
    """What Megatron's writer puts into its queue of results."""

    last: Any = None

    def put(self, answer: tuple[int, Any]) -> None:
        self.last = answer[1]


class _NoCount:
    """Megatron's writer tells its parent through a queue that it is done; here it is the caller."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def agreed(act: Callable[[], Answer], what: str) -> Answer:
    """Do `act`, which may fail on some rank, and agree on whether all succeeded.

    Raises:
        SaveFailed: it failed somewhere; on every rank.
    """
    faults: list[list[str]] = [[]] * dist.get_world_size()
    cause: BaseException | None = None
    try:
        answer = act()
    # torch's is no Exception; whatever it is, the other ranks must not wait for this one
    except (Exception, CheckpointException) as error:  # noqa: BLE001
        cause = error
    dist.all_gather_object(faults, [] if cause is None else _told(cause))
    # what torch has told every rank of is said once
    if found := list(dict.fromkeys(fault for of_rank in faults for fault in of_rank)):
        raise SaveFailed(f"cannot {what} the checkpoint: {directory.described(found)}") from cause
    return answer


def ranks_agree_on(answer: Any) -> Any:
    """The answer of rank 0, on every rank."""
    box = [answer]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _told(error: BaseException) -> list[str]:
    if isinstance(error, CheckpointException):
        return [f"rank {rank}: {_named(fault)}" for rank, (fault, _) in sorted(error.failures.items())]
    return [f"rank {dist.get_rank()}: {_named(error)}"]


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError | directory.Damaged) else f"{type(error).__name__}: {error}"


def _gathered(outcome: _Outcome) -> list[_Outcome] | None:
    """Of every rank, on rank 0; None elsewhere."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(outcome, parts)
    return parts
