"""Requests that wait for a slot: a lane for the urgent ones, oldest first, and one that goes by an order. Pure.

Flows in: requests as they begin to wait. Flows out: whom a slot is offered next.
Invariants: urgent ones go before all others; one that cannot be given a slot because it avoids an engine keeps nobody
from that engine; a request leaves its lane once.
"""

from asyncio import Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slimerl.rollout.order import Entry, LengthOrder, Progress
from slimerl.rollout.router import Query, Reservation


@dataclass(slots=True, eq=False)
class Waiter:
    """`budget`: tokens that the request may have."""

    query: Query
    slot: "Future[Reservation]"
    progress: Progress | None
    budget: int
    entry: Entry["Waiter"] | None = None
    """In the order; None: it is urgent."""


@dataclass
class Lanes:
    """See the module's docstring."""

    order: LengthOrder[Waiter]
    _urgent: deque[Waiter] = field(default_factory=deque)

    def add(self, waiter: Waiter, urgent: bool) -> None:
        if urgent:
            self._urgent.append(waiter)
            return
        # what was sent before, and failed there, goes first
        progress = None if waiter.query.avoid else waiter.progress
        waiter.entry = self.order.add(waiter, waiter.query.group, progress)

    def remove(self, waiter: Waiter) -> None:
        """It wants no slot any more; one that does not wait is let pass."""
        if waiter.entry is not None:
            self.order.remove(waiter.entry)
        elif waiter in self._urgent:
            self._urgent.remove(waiter)

    def hand_out(self, give: Callable[[Waiter], bool], at_most: int) -> bool:
        """Offer slots until there are none.

        Args:
            give: gives one a slot if it can, and says whether it is done with.
            at_most: of those that are done with.

        Returns:
            So many were, and others may be.
        """
        late: list[Waiter] = []
        given = 0
        while self._urgent and given < at_most:
            waiter = self._urgent.popleft()
            if give(waiter):
                given += 1
                continue
            late.append(waiter)
            if not waiter.query.avoid:
                break
        self._urgent.extendleft(reversed(late))
        skipped: list[Entry[Waiter]] = []
        while given < at_most and (entry := self.order.take()) is not None:
            if give(entry.item):
                given += 1
                self.order.sent(entry)
                continue
            skipped.append(entry)
            if not entry.item.query.avoid:
                break
        for entry in skipped:
            self.order.put_back(entry)
        return given == at_most

    def __len__(self) -> int:
        return len(self._urgent) + len(self.order)
