"""The control services of several rollout processes: the first has the ledger, and answers the trainer for all of them.

Flows in: as of `ControlService`; of the others, weights, engines, payloads and parts of evaluations. Flows out: batches
of all shards, the books of the whole run, and its state for a checkpoint.
Invariant: a checkpoint has what the processes have of each group that no step has trained, and that the others are to
be made: a run that goes on there has them all, however many processes it has (`shared_state.py`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.ledger_desk import LedgerDesk
from slimerl.rollout.process_calls import ProcessCalls
from slimerl.rollout.scheduler import RolloutStopped
from slimerl.rollout.service import ControlService, Handler, NoEngine
from slimerl.rollout.shard_scheduler import ShardScheduler
from slimerl.rollout.shared_evaluation import evaluated_part
from slimerl.rollout.shared_state import give_share, refuse_while_out, resumed, share_of, whole_state
from slimerl.rollout.weights import HoldError
from slimerl.samples.books import StoreError, step_of_batch
from slimerl.samples.ledger_messages import EvaluatedPart, EvaluatePart
from slimerl.samples.messages import (
    BatchManifest,
    BatchTrained,
    NextBatchRequest,
    Path,
    RolloutState,
    Status,
    SyncWanted,
    decode,
    encode,
)

HOPELESS_S = 30.0
"""For engines to be reported that came into service with the last sync."""
_LOGGED = frozenset({Path.NEXT_BATCH, Path.RELEASE, Path.RESTORE})
"""Of which the ledger decides something."""


@dataclass
class ShardService(ControlService):
    """Of any of the processes. `news`: called when there may be something to tell the ledger."""

    news: Callable[[], None] = lambda: None
    _parts: "dict[tuple[int, int], asyncio.Task[EvaluatedPart]]" = field(default_factory=dict)
    """The newest evaluation, by its step and version."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scheduler, ShardScheduler):
            self.scheduler.awaits_engines = lambda: bool(self.returning.names() or self.weights.busy)

    def _progressed(self) -> None:
        super()._progressed()
        self.news()

    async def next_batch(self, request: NextBatchRequest) -> BatchManifest | SyncWanted:
        raise StoreError(f"batch {request.step}: this rollout process is one of several; ask the first one")

    def application(self) -> web.Application:
        application = super().application()
        application.add_routes([web.post(Path.EVALUATE_PART, self._evaluate_part)])
        return application

    def stop(self) -> None:
        super().stop()
        for evaluating in self._parts.values():
            evaluating.cancel()

    @property
    def shard(self) -> ShardScheduler:
        if not isinstance(self.scheduler, ShardScheduler):
            raise TypeError(f"one of several rollout processes makes what is ordered, unlike {self.scheduler}")
        return self.scheduler

    async def _restore(self, request: web.Request) -> web.Response:
        """Of this process, its part."""
        self.restore_share(decode(await request.read(), RolloutState))
        return _answer(self.status())

    def restore_share(self, share: RolloutState) -> None:
        """What a checkpoint has of groups that are to be gone on with here. Raises StoreError, DataError."""
        self.shard.go_on_with(share)
        self.news()

    async def _evaluate_part(self, request: web.Request) -> web.Response:
        """Answers with an `EvaluatedPart`; asked again, maybe by another process, it is the same evaluation."""
        wanted = decode(await request.read(), EvaluatePart)
        key = (wanted.step, self.router.version)
        if key not in self._parts:
            for of_before in self._parts.values():
                of_before.cancel()
            self._parts = {key: asyncio.create_task(evaluated_part(self.evaluation, wanted))}
        evaluating = self._parts[key]
        try:
            return _answer(await asyncio.shield(evaluating))
        finally:
            if evaluating.done() and (evaluating.cancelled() or evaluating.exception() is not None):
                self._parts.pop(key, None)


@dataclass
class FrontService(ShardService):
    """Of the first process."""

    desk: LedgerDesk | None = None
    calls: ProcessCalls | None = None
    """To the others."""
    samples_per_group: int = 1
    restore_s: float = 60.0
    """For the others to take what a checkpoint has for them."""
    _telling: "set[asyncio.Task[None]]" = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        # not `_progressed`: whoever reports would be told that there is something to report
        self.ledger.changed = self._progress.set

    @property
    def ledger(self) -> LedgerDesk:
        if self.desk is None:
            raise TypeError("the first of several rollout processes has the ledger")
        return self.desk

    @property
    def others(self) -> ProcessCalls:
        if self.calls is None:
            raise TypeError("the first of several rollout processes asks the others")
        return self.calls

    def application(self) -> web.Application:
        application = super().application()
        application.add_routes(self.ledger.routes())
        application.middlewares.append(self._logged)
        return application

    def status(self) -> Status:
        counts = self.ledger.ledger.counts()
        return msgspec.structs.replace(
            super().status(),
            admitted=counts.admitted,
            running=counts.running,
            buffered=counts.buffered,
            trained=counts.trained,
            dropped=counts.dropped,
        )

    def _serving(self) -> bool:
        """Has every process an engine that serves?"""
        return self.ledger.all_serve()

    def _unsynced(self) -> list[str]:
        """Of all processes."""
        return [] if self.weights.busy else self.ledger.unsynced()

    def _released(self, version: int) -> None:
        self.ledger.ledger.advance(version)
        super()._released(version)
        self._soon(self.ledger.tell())

    @web.middleware
    async def _logged(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What an answer tells is in the log of the ledger before."""
        answer = await handler(request)
        if request.path in _LOGGED:
            await self.ledger.tell()
        return answer

    def catch_up(self) -> None:
        """In the place of a process that ended: the ledger knows of the weights that were released last, which the one
        before may not have come to tell it."""
        released = self.scheduler.served.weights.version
        if released > self.ledger.ledger.books.gate.version:
            self.ledger.ledger.advance(released)

    async def next_batch(self, request: NextBatchRequest) -> BatchManifest | SyncWanted:
        """As `ControlService.next_batch`, of all shards."""
        deadline = Deadline(f"the batch of step {request.step}", request.timeout_s)
        hopeless: Deadline | None = None
        while True:
            self._progress.clear()
            manifest = self.ledger.take_batch(request.step)
            if manifest is not None:
                figures = {"rollout/event_loop_lag_s": self.lag.take_worst_s()} | self.figures()
                if self._journal_failed():
                    figures["rollout/journal_failed"] = 1.0
                return msgspec.structs.replace(manifest, metrics={**manifest.metrics, **figures})
            if self.shutdown.is_set():
                raise NoEngine("the rollout role is shutting down")
            if self.router.version < 0:
                raise HoldError("no weights have been released yet; sync them before asking for a batch")
            if stopped := self.ledger.stopped():
                raise RolloutStopped(stopped)
            if engines := self._unsynced():
                return SyncWanted(engines)
            hopeless = self._hopeless(hopeless)
            deadline.check(self.ledger.what_is_missing())
            try:
                async with asyncio.timeout(min(each.remaining_s for each in (deadline, hopeless) if each)):
                    await self._progress.wait()
            except TimeoutError:
                continue

    def _hopeless(self, since: Deadline | None) -> Deadline | None:
        """While no process has an engine: until it is taken to have none. Raises NoEngine."""
        if not self.ledger.bereft():
            return None
        since = since or Deadline("an engine of any rollout process", HOPELESS_S)
        if not since.remaining_s:
            raise NoEngine(f"no rollout process has an engine that serves, for {HOPELESS_S:g} s; see their logs")
        return since

    async def _trained(self, request: web.Request) -> web.Response:
        batch_id = decode(await request.read(), BatchTrained).batch_id
        await self.ledger.trained(step_of_batch(batch_id))
        return _answer(self.status())

    async def _state(self, _: web.Request) -> web.Response:
        return _answer(await self.state())

    async def _restore(self, request: web.Request) -> web.Response:
        await self.restore(decode(await request.read(), RolloutState))
        return _answer(self.status())

    async def state(self) -> RolloutState:
        """Of the whole run. Raises StoreError while a batch is out."""
        books = self.ledger.ledger.books
        refuse_while_out(books)
        asked = sorted({one.shard for one in books.groups.values() if one.shard})
        found = await asyncio.gather(*(share_of(self.others, process) for process in asked))
        shares = {0: self.scheduler.state().groups, **dict(zip(asked, found, strict=True))}
        return whole_state(self.ledger.ledger.books, shares, self.scheduler.prompts, self.samples_per_group)

    async def restore(self, state: RolloutState) -> None:
        """Go on after a step; told again, maybe by a process that has taken over, it is the same.

        Raises:
            StoreError, DataError, GateError: the state does not fit.
            DeadlineExceeded: another process does not take its part in time.
        """
        ledger = self.ledger.ledger
        whole = resumed(state, ledger.books, self.scheduler.prompts, self.samples_per_group)
        ledger.restore(whole.books)
        if (own := whole.shares.pop(0, None)) is not None:
            self.restore_share(own)
        # what the others say that they hold is to be known here, whatever becomes of this process
        await self.ledger.tell()
        deadline = Deadline("the other rollout processes to go on", self.restore_s)
        await asyncio.gather(*(give_share(self.others, *each, deadline) for each in whole.shares.items()))

    def _journal_failed(self) -> bool:
        journal = self.scheduler.journal
        return bool(self.ledger.log.failure or (journal is not None and journal.failure))

    def _soon(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _answer(message: msgspec.Struct) -> web.Response:
    return web.Response(body=encode(message), content_type="application/msgpack")
