"""A shard's line to the admission ledger: says what is new at once, and hears what there is to do.

Flows in: what the shard's link has to tell (`shard_link.py`). Flows out: orders, each carried out once.
Invariants: the shard's own journal has an event before the ledger hears of it, so that one that starts again can say
what it holds; a shard that cannot reach the ledger for `patience_s` ends with an error that says so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.process_calls import ProcessCalls, ProcessUnreachable
from slimerl.rollout.shard_link import ShardLink
from slimerl.samples.ledger_messages import LedgerReply, NotHeard, Order, ShardJoin, ShardReport
from slimerl.samples.messages import Path as Endpoint

logger = logging.getLogger(__name__)

RETRY_S = 0.2
SILENCE = 0.4
"""Of a lease: as long as a report waits for an order where there is none."""
FIRST_WAIT_S = 0.5
"""Before the ledger has said how long a lease is."""
ANSWER_S = 20.0
"""For an answer, beside what it may wait."""

Ask = Callable[[ShardJoin | ShardReport], Awaitable[LedgerReply | NotHeard]]
"""Raises ProcessUnreachable, ProcessRefused."""


async def _nothing() -> None: ...


@dataclass
class LedgerLine:
    """
    Args of the constructor:
        ask: the ledger.
        room: groups that are welcome beside those held.
        carry_out: called with each order.
        journaled: waits until the shard's journal has all that happened.
        stopped, unsynced, serving: as in `ShardReport`.
    """

    link: ShardLink
    ask: Ask
    room: Callable[[], int]
    carry_out: Callable[[Order], None]
    patience_s: float
    journaled: Callable[[], Awaitable[None]] = _nothing
    stopped: Callable[[], str] = str
    unsynced: Callable[[], list[str]] = list
    serving: Callable[[], int] = int
    _lease_s: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """There is something to tell."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Raises ProcessRefused, DeadlineExceeded."""
        deadline = Deadline("the admission ledger to answer", self.patience_s)
        while True:
            try:
                await self._exchange()
            except ProcessUnreachable as error:
                deadline.check(str(error))
                await asyncio.sleep(RETRY_S)
            else:
                deadline = Deadline("the admission ledger to answer", self.patience_s)

    async def _exchange(self) -> None:
        """One message and its reply. While the ledger has nothing to say, news of this side come before it."""
        self._wake.clear()
        wait_s = 0.0 if self.link.has_news else (self._lease_s * SILENCE or FIRST_WAIT_S)
        message: ShardJoin | ShardReport = self.link.join()
        if self.link.joined:
            message = self.link.report(self.room(), wait_s, self.stopped(), self.unsynced(), self.serving())
        await self.journaled()
        asking = asyncio.ensure_future(self.ask(message))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([asking, waking], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and not wait_s:
                await asyncio.wait([asking])
            if asking.done():
                self._take(asking.result())
        finally:
            for task in (asking, waking):
                task.cancel()
            await asyncio.gather(asking, waking, return_exceptions=True)

    def _take(self, reply: LedgerReply | NotHeard) -> None:
        if isinstance(reply, NotHeard):
            logger.warning("shard %d is not heard any more as %d, and joins again", self.link.shard, reply.given)
            self.link.fenced(reply.given, reply.incarnation)
            return
        self._lease_s = reply.lease_s
        for order in self.link.take(reply):
            self.carry_out(order)


def _reply(body: bytes) -> LedgerReply | NotHeard:
    return msgspec.msgpack.decode(body, type=LedgerReply | NotHeard)


def remote_ledger(calls: ProcessCalls) -> Ask:
    """The ledger of the first rollout process of a run, wherever that is now."""

    async def ask(message: ShardJoin | ShardReport) -> LedgerReply | NotHeard:
        path, wait_s = Endpoint.LEDGER_JOIN, 0.0
        if isinstance(message, ShardReport):
            path, wait_s = Endpoint.LEDGER_REPORT, message.wait_s
        return await calls.ask(0, path, message, _reply, ANSWER_S + wait_s)

    return ask
