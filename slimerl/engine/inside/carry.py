"""Carrying parcels: one member's part of a transfer, whoever it is and whatever its links are.

Flows in: the member's steps, its links, its parcels. Flows out: every parcel where the plan wants it.
Invariants: all members' steps come from one total order, and each begins its own in that order; so the first step of
all that has not ended can always end, and no set of members waits for each other. At most `IN_FLIGHT` operations each
way are under way, which bounds the buffers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from slimerl.engine.inside.links import Link, LinkBroken, OpenLink, Operation
from slimerl.resilience.deadline import Deadline

IN_FLIGHT = 4


class Step(NamedTuple):
    """One parcel from or to one other member."""

    sends: bool
    peer: int
    parcel: int
    nbytes: int


class Parcels(Protocol):
    """A member's bytes, by parcel (uint8)."""

    def outgoing(self, parcel: int) -> torch.Tensor:
        """What is to be sent; it has arrived before where it is passed on."""

    def incoming(self, parcel: int, nbytes: int) -> torch.Tensor:
        """Where it is to be received."""

    def arrived(self, parcel: int) -> None: ...

    def left(self, parcel: int) -> None:
        """Sent once; called for each time."""


class Traffic:
    """A member's links, opened once for a set of steps and kept from sync to sync. `close` it."""

    def __init__(self, member: int, steps: Sequence[Step], open_link: OpenLink) -> None:
        """Raises LinkBroken where another member does not come."""
        self.member, self.steps = member, list(steps)
        self._links: dict[tuple[bool, int], Link] = {}
        ends = {(member, s.peer) if s.sends else (s.peer, member) for s in self.steps}
        try:
            for sender, receiver in sorted(ends):
                sends = sender == member
                self._links[sends, receiver if sends else sender] = open_link(sender, receiver)
        except BaseException:
            self.close()
            raise

    def run(self, parcels: Parcels, deadline: Deadline) -> None:
        """All steps once. Whatever it raises, `close` the traffic then, so that the others notice at once.

        Raises:
            LinkBroken: names the hop.
            DeadlineExceeded: between two steps.
        """
        _run(self.member, self.steps, self._links, parcels, deadline)

    def abort(self) -> None:
        """From another thread: `run` ends as LinkBroken at once."""
        for link in list(self._links.values()):
            link.abort()

    def close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()


def _run(
    member: int, steps: Sequence[Step], links: Mapping[tuple[bool, int], Link], parcels: Parcels, deadline: Deadline
) -> None:
    ahead = _posted(member, steps, links, parcels)
    posted: deque[Operation] = deque()
    sending: deque[tuple[Operation, Step]] = deque()

    def settle(operation: Operation, step: Step) -> None:
        with _named(member, step):
            operation.wait(deadline.remaining_s)
        if step.sends:
            parcels.left(step.parcel)

    for step in steps:
        deadline.check(f"member {member} was at parcel {step.parcel}")
        if step.sends:
            with _named(member, step):
                sending.append((links[True, step.peer].send(parcels.outgoing(step.parcel)), step))
            if len(sending) > IN_FLIGHT:
                settle(*sending.popleft())
            continue
        while len(posted) < IN_FLIGHT and (operation := next(ahead, None)) is not None:
            posted.append(operation)
        settle(posted.popleft(), step)
        parcels.arrived(step.parcel)
    while sending:
        settle(*sending.popleft())


def _posted(
    member: int, steps: Sequence[Step], links: Mapping[tuple[bool, int], Link], parcels: Parcels
) -> Iterator[Operation]:
    """Begins the next receive each time it is asked."""
    for step in steps:
        if not step.sends:
            with _named(member, step):
                operation = links[False, step.peer].receive(parcels.incoming(step.parcel, step.nbytes))
            yield operation


@contextmanager
def _named(member: int, step: Step) -> Iterator[None]:
    """Says of a broken link which it was."""
    try:
        yield
    except LinkBroken as error:
        ends = (member, step.peer) if step.sends else (step.peer, member)
        problem = f"{ends[0]} → {ends[1]}, parcel {step.parcel}: {error}"
        raise LinkBroken(problem, error.stood_still, (*ends, step.parcel)) from None


Arrived = Callable[[int, torch.Tensor], None]


class Relay:
    """The parcels of a member that receives: in one staging buffer, or, without, only until they have been stored and
    passed on."""

    def __init__(self, steps: Sequence[Step], arrived: Arrived, device: torch.device) -> None:
        """`arrived`: what to do with a parcel that has come."""
        self._arrived, self._device = arrived, device
        self._to_send: dict[int, int] = {}
        for step in steps:
            if step.sends:
                self._to_send[step.parcel] = self._to_send.get(step.parcel, 0) + 1
        self._held: dict[int, torch.Tensor] = {}

    def place(self, _parcel: int) -> torch.Tensor | None:
        """Where a parcel stays; None: nowhere."""
        return None

    def outgoing(self, parcel: int) -> torch.Tensor:
        return self._held[parcel]

    def incoming(self, parcel: int, nbytes: int) -> torch.Tensor:
        kept = self.place(parcel)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if kept is None else kept
        self._held[parcel] = flat
        return flat

    def arrived(self, parcel: int) -> None:
        self._arrived(parcel, self._held[parcel])
        self._forget_unless_sent(parcel)

    def left(self, parcel: int) -> None:
        self._to_send[parcel] -= 1
        self._forget_unless_sent(parcel)

    def _forget_unless_sent(self, parcel: int) -> None:
        if not self._to_send.get(parcel):
            del self._held[parcel]


class Staged(Relay):
    """Parcels that are to be stored stay in a staging buffer, where a commit finds them."""

    def __init__(
        self, steps: Sequence[Step], arrived: Arrived, staging: torch.Tensor, slots: Mapping[int, tuple[int, int]]
    ) -> None:
        """`slots`: by parcel, its first byte in `staging` and its size."""
        super().__init__(steps, arrived, staging.device)
        self._staging, self._slots = staging, slots

    def place(self, parcel: int) -> torch.Tensor | None:
        slot = self._slots.get(parcel)
        return None if slot is None else self._staging[slot[0] : slot[0] + slot[1]]
