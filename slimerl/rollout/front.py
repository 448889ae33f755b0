"""The control services of several rollout processes: the first has the ledger, and answers the trainer for all of them.

Flows in: as of `ControlService`; of the others, weights, engines, payloads and parts of evaluations. Flows out: batches
of all shards, the books of the whole run, and its state for a checkpoint.
Invariant: of groups that no step has trained a checkpoint has that they are to be made: a run that goes on there makes
them again, under the same ids and from the same seeds.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.ledger_books import LedgerGroup, Snapshot
from slimerl.rollout.ledger_desk import LedgerDesk
from slimerl.rollout.prompts import PromptStream
from slimerl.rollout.scheduler import RolloutStopped
from slimerl.rollout.service import ControlService, Handler, NoEngine
from slimerl.rollout.shared_evaluation import evaluated_part
from slimerl.rollout.weights import HoldError
from slimerl.samples.books import StoreError, step_of_batch
from slimerl.samples.ledger_messages import EvaluatedPart, EvaluatePart
from slimerl.samples.messages import (
    BatchManifest,
    BatchTrained,
    NextBatchRequest,
    Path,
    RolloutState,
    SavedGroup,
    Status,
    SyncWanted,
    decode,
    encode,
)

_LOGGED = frozenset({Path.NEXT_BATCH, Path.RELEASE, Path.RESTORE})
"""Of which the ledger decides something."""


@dataclass
class ShardService(ControlService):
    """Of any of the processes. `news`: called when there may be something to tell the ledger."""

    news: Callable[[], None] = lambda: None
    _parts: "dict[tuple[int, int], asyncio.Task[EvaluatedPart]]" = field(default_factory=dict)
    """The newest evaluation, by its step and version."""

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
    samples_per_group: int = 1
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
            deadline.check(self.ledger.what_is_missing())
            try:
                async with asyncio.timeout(deadline.remaining_s):
                    await self._progress.wait()
            except TimeoutError:
                continue

    async def _trained(self, request: web.Request) -> web.Response:
        batch_id = decode(await request.read(), BatchTrained).batch_id
        await self.ledger.trained(step_of_batch(batch_id))
        return _answer(self.status())

    async def _state(self, _: web.Request) -> web.Response:
        return _answer(self.state())

    async def _restore(self, request: web.Request) -> web.Response:
        self.restore(decode(await request.read(), RolloutState))
        return _answer(self.status())

    def state(self) -> RolloutState:
        """Of the whole run. Raises StoreError while a batch is out."""
        books = self.ledger.ledger.books
        if books.batches:
            raise StoreError(f"batch {sorted(books.batches)} is out; save after it was trained")
        prompts = self.scheduler.prompts
        groups = [self._saved(prompts, group) for group in books.groups.values()]
        # of a group that is made again nothing was dropped
        settled = [one.settled.dropped for one in books.groups.values() if one.settled is not None]
        dropped = books.dropped - sum(map(Counter, settled), Counter[str]())
        return RolloutState(books.batches_taken, books.cursor, books.trained, dict(dropped), {}, groups)

    def restore(self, state: RolloutState) -> None:
        """Go on after a step. Raises StoreError, DataError."""
        ledger = self.ledger.ledger
        found = self.scheduler.prompts.positions(group.group_id for group in state.groups)
        groups = [LedgerGroup(found[group.group_id], state.steps, None) for group in state.groups]
        size = self.samples_per_group
        admitted = state.trained + sum(state.dropped.values()) + len(groups) * size
        accepted = state.steps * ledger.books.gate.groups_per_step
        told = (admitted, state.trained, dict(state.dropped))
        shards = ledger.books.snapshot().shards
        ledger.restore(Snapshot(state.steps, state.cursor, accepted, state.steps, *told, groups, shards))
        self.scheduler.gate.advance(state.steps)

    def _saved(self, prompts: PromptStream, group: LedgerGroup) -> SavedGroup:
        name = prompts.at(group.position).group_id
        return SavedGroup(name, group.version, [f"{name}/{number}" for number in range(self.samples_per_group)], [])

    def _journal_failed(self) -> bool:
        journal = self.scheduler.journal
        return bool(self.ledger.log.failure or (journal is not None and journal.failure))

    def _soon(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _answer(message: msgspec.Struct) -> web.Response:
    return web.Response(body=encode(message), content_type="application/msgpack")
