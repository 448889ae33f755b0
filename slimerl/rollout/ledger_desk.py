"""The admission ledger as a service of one rollout process: its log on the disk, its clock, its HTTP.

Flows in: joins and reports of shards, the wishes of this process for its trainer. Flows out: replies; a report that
brings nothing new and finds nothing new waits a while for an order.
Invariant: what was decided is written before anybody is told of it, and a process that takes over goes on from there.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.group_notes import ENGINES, batch_figures
from slimerl.rollout.journal_file import JournalFile, read_records
from slimerl.rollout.ledger import AdmissionLedger, Fenced, replayed
from slimerl.rollout.ledger_books import LedgerRecord
from slimerl.samples.books import name_of_batch
from slimerl.samples.journal import JournalDamaged
from slimerl.samples.ledger_messages import NO_ENGINE, LedgerReply, NotHeard, ShardJoin, ShardReport
from slimerl.samples.messages import BatchManifest, decode, encode
from slimerl.samples.messages import Path as Endpoint

logger = logging.getLogger(__name__)

LOOKS = 4
"""At the leases, in the time that one lasts."""


@dataclass
class LedgerDesk:
    """`changed` is called whenever a batch may have become complete."""

    ledger: AdmissionLedger
    log: JournalFile
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    heard: dict[int, ShardReport] = field(default_factory=dict)
    """The last report of each shard."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Of this moment; another takes its place once it is set."""
    _figures: dict[tuple[int, ...], dict[str, float]] = field(default_factory=dict)
    """Of the last batch that was handed out, by its positions."""

    def routes(self) -> list[web.RouteDef]:
        """Of the control service, which turns errors into refusals."""
        return [web.post(Endpoint.LEDGER_JOIN, self._join), web.post(Endpoint.LEDGER_REPORT, self._report)]

    async def _join(self, request: web.Request) -> web.Response:
        reply = await self.hear(decode(await request.read(), ShardJoin))
        return web.Response(body=encode(reply), content_type="application/msgpack")

    async def _report(self, request: web.Request) -> web.Response:
        reply = await self.hear(decode(await request.read(), ShardReport))
        return web.Response(body=encode(reply), content_type="application/msgpack")

    async def hear(self, message: ShardJoin | ShardReport) -> LedgerReply | NotHeard:
        """What a shard is told. Raises LedgerError, DeadlineExceeded (the log cannot be written)."""
        try:
            if isinstance(message, ShardJoin):
                logger.info(
                    "shard %d joins as %d with %d groups", message.shard, message.incarnation, len(message.held)
                )
                reply = self.ledger.join(message, self.clock())
            else:
                reply = self.ledger.report(message, self.clock())
                self.heard[message.shard] = message
        except Fenced as error:
            logger.warning("%s", error)
            return NotHeard(error.given, error.incarnation)
        await self.tell()
        if isinstance(message, ShardReport) and not (reply.orders or message.events):
            return await self._when_ordered(message)
        return reply

    async def advance(self, version: int) -> None:
        """Engines serve `version`. Raises GateError."""
        self.ledger.advance(version)
        await self.tell()

    def take_batch(self, step: int) -> BatchManifest | None:
        """The batch of a step; None while it is not complete. `tell` is to be waited for before it is handed out.

        Raises:
            StoreError: it was trained already.
            LedgerError: it is not the next one, or behind the last step of the run.
        """
        batch = self.ledger.take_batch(step)
        if batch is None:
            return None
        if batch.positions not in self._figures:
            books = self.ledger.books
            dropped = books.told - books.told_before
            figures = batch_figures(batch.samples, batch.notes, dropped, books.gate.version)
            figures[ENGINES] = float(sum(each.serving for each in self._present()))
            self._figures = {batch.positions: figures}
        return BatchManifest(
            name_of_batch(step), step, list(batch.samples), self._figures[batch.positions], batch.shards
        )

    def stopped(self) -> str:
        """Why nothing more will come of some shard."""
        return next((f"shard {each.shard}: {each.stopped}" for each in self.heard.values() if each.stopped), "")

    def unsynced(self) -> list[str]:
        """Engines of all shards that have registered since the last sync."""
        return [name for each in self._present() for name in each.unsynced]

    def all_serve(self) -> bool:
        """Has every shard that is there an engine that serves?"""
        return all(each.serving for each in self._present())

    def bereft(self) -> bool:
        """Has no shard any engine left?"""
        present = self._present()
        return len(present) == len(self.ledger.books.shards) and all(each.room == NO_ENGINE for each in present)

    def _present(self) -> list[ShardReport]:
        """The last reports of the shards that are not lost."""
        shards = self.ledger.books.shards
        return [each for number, each in self.heard.items() if not shards[number].lost]

    def what_is_missing(self) -> str:
        """Of the next batch."""
        books = self.ledger.books
        return (
            f"{books.ready()} of {books.gate.groups_per_step} groups ready, {len(books.groups) - books.settled} under "
            f"way, {len(books.homeless)} of them at no shard; shards not heard of: {self.ledger.awaited or 'none'}, "
            f"lost: {[number for number, shard in enumerate(books.shards) if shard.lost] or 'none'}"
        )

    async def trained(self, step: int) -> None:
        """See `AdmissionLedger.trained`."""
        self.ledger.trained(step)
        if self.log.is_long:
            self.log.begin(self.ledger.books.snapshot())
        await self.tell()

    async def watch(self) -> None:
        """Take from shards that have fallen silent what they hold; until cancelled."""
        pause_s = self.ledger.lease_s / LOOKS
        while True:
            looked_s = self.clock()
            await asyncio.sleep(pause_s)
            if self.clock() - looked_s > 2 * pause_s:
                continue  # this process stood still, and reports may wait to be read
            if lost := self.ledger.expire(self.clock()):
                silent_s = self.ledger.lease_s
                logger.error("nothing was heard of shards %s for %g s; others make their groups", lost, silent_s)
                await self.tell()

    def close(self) -> None:
        self.log.close()

    async def tell(self) -> None:
        """Once what was decided is written, whoever waits may know."""
        await self.log.written()
        self._news.set()
        self._news = asyncio.Event()
        self.changed()

    async def _when_ordered(self, report: ShardReport) -> LedgerReply | NotHeard:
        deadline = Deadline(f"an order for shard {report.shard}", report.wait_s)
        shard = self.ledger.books.shards[report.shard]
        while not shard.orders and deadline.remaining_s:
            await _wait(self._news, deadline)
        if shard.incarnation != report.incarnation or shard.lost:
            return NotHeard(report.incarnation, shard.incarnation)
        reply = self.ledger.reply(report.shard)
        await self.log.written()
        return reply


async def open_ledger(
    directory: Path,
    gate: StalenessGate,
    samples_per_group: int,
    shards: int,
    lease_s: float,
    patience_s: float,
    must: bool = False,
) -> LedgerDesk:
    """With what an earlier process has left there.

    Args:
        gate: as at the start of the run.
        patience_s: how long shards have to come for the first time.
        must: there was an earlier process.

    Raises:
        JournalDamaged, OSError: it cannot be gone on with.
    """
    records = await asyncio.to_thread(lambda: list(read_records(directory, LedgerRecord)))
    if must and not records:
        raise JournalDamaged(f"{directory} holds no ledger to take over; the run has to start over")
    books = replayed(records, gate, samples_per_group, shards)
    log = JournalFile(directory)
    desk = LedgerDesk(AdmissionLedger(books, lease_s, time.monotonic(), patience_s, log.note), log)
    log.begin(books.snapshot())
    log.publish()
    await log.written()
    return desk


async def _wait(event: asyncio.Event, deadline: Deadline) -> None:
    """For the event, or the deadline."""
    try:
        async with asyncio.timeout(deadline.remaining_s):
            await event.wait()
    except TimeoutError:
        return
