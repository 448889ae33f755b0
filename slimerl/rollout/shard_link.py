"""A shard's side of what it has with the admission ledger: what it holds, what it has to tell, what it was told. Pure.

Flows in: what became of its groups, the ledger's replies, in whatever order and however often they come. Flows out:
joins and reports to send, orders to carry out, each once.
Invariant: an event is told until the ledger has it in its books; `held` is what the shard has of groups, so that one
that has to join again can say it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slimerl.samples.ledger_messages import (
    Event,
    Held,
    LedgerReply,
    LetGo,
    Make,
    Order,
    Returned,
    Settled,
    ShardJoin,
    ShardReport,
)


@dataclass
class ShardLink:
    """`incarnation`: higher than that of any process that was this shard before."""

    shard: int
    incarnation: int
    held: dict[int, Held] = field(default_factory=dict)
    """By position: of groups under way, and of those whose payload is here."""
    joined: bool = False
    _join: ShardJoin | None = None
    _seen: int = 0
    _heard: int = 0
    _events: list[Event] = field(default_factory=list)
    """Those after `_heard`."""

    def hold(self, held: Iterable[Held]) -> None:
        """What is here of before: of a process that was this shard, or of a checkpoint. Where the ledger may know this
        shard already, it joins again to say so."""
        self.held |= {one.position: one for one in held}
        if self._join is not None:
            self.fenced(self.incarnation, self.incarnation)

    def join(self) -> ShardJoin:
        """To send until the ledger has replied; the same as long as it is for the same incarnation."""
        if self._join is None:
            self._join = ShardJoin(self.shard, self.incarnation, list(self.held.values()))
            self._seen, self._heard, self._events = 0, 0, []
        return self._join

    def fenced(self, given: int, incarnation: int) -> None:
        """The ledger does not hear incarnation `given` any more, but one that is higher than `incarnation`."""
        if given != self.incarnation:
            return  # said of before it joined again
        self.incarnation = max(given, incarnation) + 1
        self.joined, self._join = False, None

    def report(
        self, room: int, wait_s: float = 0.0, stopped: str = "", unsynced: Sequence[str] = (), serving: int = 0
    ) -> ShardReport:
        """What the ledger may not know yet. `room`: groups that are welcome beside those held."""
        first, events = self._heard + 1, list(self._events)
        said = (wait_s, stopped, list(unsynced), serving)
        return ShardReport(self.shard, self.incarnation, self._seen, room, first, events, *said)

    @property
    def has_news(self) -> bool:
        """Is there an event that the ledger has not booked?"""
        return bool(self._events)

    def take(self, reply: LedgerReply) -> list[Order]:
        """The orders of a reply that are new; what they say of `held` is done."""
        if reply.incarnation != self.incarnation:
            return []  # of before it joined again
        self.joined = True
        if (known := reply.heard - self._heard) > 0:
            del self._events[:known]
            self._heard = reply.heard
        if reply.first > self._seen + 1:
            raise ValueError(
                f"shard {self.shard}: orders {self._seen + 1} to {reply.first - 1} of the ledger are missing"
            )
        new = reply.orders[self._seen + 1 - reply.first :]
        for order in new:
            self._seen += 1
            self._note(order)
        return new

    def settled(self, event: Settled) -> None:
        """All samples of a group that is held are judged or dropped."""
        held = self.held.pop(event.position)
        if event.samples:
            self.held[event.position] = Held(held.position, held.version, event)
        self._events.append(event)

    def returned(self, position: int) -> None:
        """A group that is held is given back."""
        del self.held[position]
        self._events.append(Returned(position))

    def _note(self, order: Order) -> None:
        match order:
            case Make(position=position, version=version):
                self.held[position] = Held(position, version)
            case LetGo(positions=positions):
                for position in positions:
                    del self.held[position]
            case _:
                # it may have come to nothing in the meantime
                self.held.pop(order.position, None)
