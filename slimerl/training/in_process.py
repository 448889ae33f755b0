"""The ranks of a trainer begin anew inside their processes, where what they have in common failed and none is gone.

Flows in: what ended a rank's attempt at the run. Flows out: every rank in the next attempt, from the newest checkpoint,
with imports, compiled kernels and the GPU's context as they are; or the failure itself, as where none is allowed.
Invariants: all ranks begin the next attempt or none does; an error of the program or of the data, on any rank, ends
the attempts of all; whatever stands against one, or takes longer than its deadline, leaves it to a restart of the run.

Ranks that wait in gloo for this one are woken by their connections, which would otherwise last as long as any reference
to their group; those that wait in NCCL by the package that can abort it. That package's own wrapper is not used: it
wakes no rank that waits in gloo, and its monitors would outlive their ranks.
"""

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from slimerl.engine.inside.mailbox import CoordinatorGone
from slimerl.resharding.shard_sync import SyncEnded
from slimerl.resilience import heartbeat
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.failure_kinds import FailureKind, RestartBudget
from slimerl.spec import RunSpec
from slimerl.telemetry.run_log import EVENTS_FILE, exported, read_records
from slimerl.training import parallel
from slimerl.training.checkpoint.checkpointer import checkpoint_root
from slimerl.training.checkpoint.local import newest_checkpoint
from slimerl.training.hang_up import hang_up, open_sockets

logger = logging.getLogger(__name__)

MEET_S = 60.0
"""For the other ranks to leave what failed; beyond, the run starts over."""
LEAVE_S = 3.0
"""For a rank to notice by itself that another has left, before it is interrupted."""
POLL_S = 0.2
_TEXT = 300
"""Characters of an error that other ranks are told."""
_OF_COLLECTIVES = re.compile(r"\bgloo\b|\bNCCL\b")
INTERRUPT = signal.SIGURG
"""Nobody else's, and ignored where it comes too late."""


class PeerFailed(RuntimeError):
    """Another rank has left the attempt; raised in the midst of whatever this one was doing."""


class NotTogether(RuntimeError):
    """The ranks do not begin anew in their processes; the message says what failed and why."""


def kind_of_error(error: Exception) -> FailureKind:
    """INFRASTRUCTURE: a collective failed or timed out, or a peer has left, also a sync that rank 0 leads. An error of
    CUDA itself is none of these: it stays with the process."""
    of_collectives = isinstance(error, PeerFailed | CoordinatorGone | SyncEnded | dist.DistError)
    # gloo's have no class of their own
    if of_collectives or (type(error) is RuntimeError and _OF_COLLECTIVES.search(str(error))):
        return FailureKind.INFRASTRUCTURE
    return FailureKind.PROGRAM


@dataclass(frozen=True)
class Board:
    """What the ranks tell each other of the end of one attempt. The first who speaks is heard."""

    store: dist.Store
    rank: int
    ranks: int

    def fail(self, text: str) -> None:
        """This rank leaves, and can begin anew."""
        self.store.compare_set("failed", "", f"rank {self.rank}: {text[:_TEXT]}")

    def end(self, text: str) -> None:
        """This rank ends, and so no other is to wait for it."""
        self.store.compare_set("ended", "", f"rank {self.rank}: {text[:_TEXT]}")

    def failed(self) -> str:
        """Who failed first, and of what; empty: nobody has."""
        return self._read("failed")

    def meet(self, deadline: Deadline) -> None:
        """Wait until all have left. Raises NotTogether: one has ended; DeadlineExceeded: one has not left."""
        self.store.set(f"left-{self.rank}", "1")
        deadline.wait_until(self._all_left, POLL_S, lambda: f"missing: {', '.join(map(str, self._missing()))}")

    def _all_left(self) -> bool:
        missing = self._missing()
        if ended := self._read("ended"):
            raise NotTogether(ended)
        return not missing

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if not self.store.check([f"left-{rank}"])]

    def _read(self, key: str) -> str:
        return self.store.get(key).decode(errors="replace") if self.store.check([key]) else ""


class InProcessRestarts:
    """Of this process, which is one rank."""

    def __init__(self, spec: RunSpec, store: dist.Store, rank: int, ranks: int) -> None:
        """Args: `store`: shared by the ranks, and outliving the attempts."""
        self._spec, self._store, self._rank, self._ranks = spec, store, rank, ranks
        self._budget = RestartBudget(spec.resilience.in_process_restarts)
        self._interruptible = False
        self._kept: frozenset[str] = frozenset()
        """Connections that are not of the present attempt."""
        self._when_left: list[Callable[[], None]] = []
        self.reason = ""
        """Why the present attempt was made; empty: it is the first."""
        signal.signal(INTERRUPT, self._interrupt)

    @staticmethod
    def of_ranks(spec: RunSpec) -> "InProcessRestarts":
        """As the environment says that the launcher gave to this rank. Raises torch.distributed.DistError."""
        store, rank, ranks = next(dist.rendezvous("env://"))
        return InProcessRestarts(spec, store, rank, ranks)

    @property
    def used(self) -> int:
        return self._budget.used

    @property
    def text(self) -> str:
        """What is to be said of the present attempt."""
        return f"{self.reason}; all ranks began anew in their processes ({self.used} of {self._budget.allowed})"

    def meeting_place(self) -> dist.Store:
        """Of the process groups of the present attempt: no key is left there of another one."""
        return dist.PrefixStore(f"attempt-{self.used}", self._store)

    def when_left(self, do: Callable[[], None]) -> None:
        """To be done where the present attempt fails and another one may follow, the last said first."""
        self._when_left.append(do)

    def run(self, attempt: Callable[[], None]) -> None:
        """Attempts, until one comes to its end.

        Raises: what ended the last one; NotTogether: that was another rank's, or they did not all leave it.
        """
        while (failure := self._tried(attempt)) is not None:
            heartbeat.enter("begin anew")
            while self._when_left:
                self._when_left.pop()()
            parallel.stop()
            hang_up(self._kept, int(os.environ.get("MASTER_PORT", 0)))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.reason = self._together(failure)
            logger.warning("%s", self.text)

    def _board(self) -> Board:
        return Board(dist.PrefixStore(f"board-{self.used}", self._store), self._rank, self._ranks)

    def _tried(self, attempt: Callable[[], None]) -> str | None:
        """None: it came to its end. Otherwise what failed; the error itself, which holds all of its frames, is gone
        when this returns."""
        board = self._board()
        try:
            with self._watched(board):
                attempt()
            return None
        except Exception as error:
            if refusal := self._refusal(error):
                board.end(f"{type(error).__name__}: {error}")
                if self._budget.used or kind_of_error(error) is FailureKind.INFRASTRUCTURE:
                    logger.error("the ranks do not begin anew in their processes: %s", refusal)
                raise
            text = f"{type(error).__name__}: {error}"
            board.fail(text)
            logger.error("left what failed, to begin anew in this process", exc_info=error)
            return text

    def _refusal(self, error: Exception) -> str:
        """Why this rank ends instead; empty: it does not."""
        if (kind := kind_of_error(error)) is not FailureKind.INFRASTRUCTURE:
            return f"an error of the {kind}"
        return self._budget.refusal(kind, 0.0, self._impossible) or ""

    def _impossible(self) -> str:
        if newest_checkpoint(checkpoint_root(self._spec)) is None:
            return "there is no checkpoint yet"
        return "the model is written already" if exported(read_records(self._spec.run_dir / EVENTS_FILE)) else ""

    def _together(self, failure: str) -> str:
        """Once this rank has let go of everything: when all have, why. Raises NotTogether."""
        # the budget counts the coming attempt already
        board = Board(dist.PrefixStore(f"board-{self.used - 1}", self._store), self._rank, self._ranks)
        try:
            board.meet(Deadline("the other trainer ranks to leave what failed", MEET_S))
            return board.failed()
        except (DeadlineExceeded, NotTogether, dist.DistError) as error:
            board.end(str(error))
            raise NotTogether(f"{failure}; the ranks do not begin anew in their processes: {error}") from None

    @contextmanager
    def _watched(self, board: Board) -> Iterator[None]:
        """Within, this rank is interrupted where another one has failed."""
        over = threading.Event()
        # a connection of its own: the other one is busy while the rank waits for a key
        store: Any = board.store
        theirs = Board(store.clone(), board.rank, board.ranks)
        main = threading.get_ident()
        watcher = threading.Thread(target=self._watch, args=(theirs, over, main), name="other ranks", daemon=True)
        watcher.start()
        self._kept = open_sockets()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False
            over.set()
            watcher.join(MEET_S)

    @staticmethod
    def _watch(board: Board, over: threading.Event, main: int) -> None:
        try:
            while not board.failed():
                if over.wait(POLL_S):
                    return
        except dist.DistError as error:
            logger.debug("nothing is heard of other ranks any more: %s", error)
            return
        if torch.cuda.is_available():
            _abort_nccl()
        if not over.wait(LEAVE_S):
            signal.pthread_kill(main, INTERRUPT)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False
            raise PeerFailed("another rank has failed")


def _abort_nccl() -> None:
    """Whoever waits in a collective of NCCL comes back with an error."""
    from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed

    if dist.is_initialized():
        AbortTorchDistributed.shutdown_all_process_group_backends()
