"""Links: one direction between two members of a sync, over which parcels travel in the order in which they were sent.

Flows in: who is at either end. Flows out: the sender's bytes at the receiver. Invariants: a link knows no third member,
so that one that dies breaks its own links alone; whatever breaks it ends as `LinkBroken` within the time given, never
as a hang; a closed link leaves no socket and no thread.

`Link` is the carrier's whole interface: process groups of two stand behind it (NCCL where every member has a GPU of
its own, else gloo); one-sided carriers such as NIXL or Mooncake could.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from slimerl.engine.inside.weight_group import failures_raise, first_line, own_address_towards
from slimerl.resilience.deadline import Deadline, DeadlineExceeded


class LinkBroken(RuntimeError):
    """The other end is gone, stands still, or cannot be reached. This process is not to blame."""

    def __init__(self, problem: str, stood_still: bool = False, hop: tuple[int, int, int] | None = None) -> None:
        """
        Args:
            stood_still: the time was over; else the link was closed.
            hop: sender, receiver and parcel; the parcel is -1 while links are opened.
        """
        super().__init__(problem)
        self.stood_still, self.hop = stood_still, hop


def broken_report(error: LinkBroken | DeadlineExceeded) -> dict[str, Any]:
    """What a member tells the coordinator. `late`: its own work took too long, it waited for nobody."""
    if isinstance(error, LinkBroken):
        return {"ok": True, "broken": str(error), "stood_still": error.stood_still, "late": False, "hop": error.hop}
    return {"ok": True, "broken": str(error), "stood_still": False, "late": True, "hop": None}


class Operation(Protocol):
    """One parcel under way."""

    def wait(self, seconds: float) -> None:
        """Raises LinkBroken where it does not end in time."""


class Link(Protocol):
    """One end of a link. `device`: where the bytes must lie. Sent and received in the same order at both ends."""

    device: torch.device

    def send(self, flat: torch.Tensor) -> Operation:
        """Begin to send; `flat` (uint8) must stay as it is until the operation has ended. Raises LinkBroken."""

    def receive(self, flat: torch.Tensor) -> Operation:
        """Begin to receive as many bytes. Raises LinkBroken."""

    def abort(self) -> None:
        """From another thread: what is under way, and whatever is begun later, ends as LinkBroken at once."""

    def close(self) -> None:
        """The other end notices at once."""


_ABORT_TAG = 1
"""Of an operation that nobody answers; parcels have 0."""

_ROUNDING_S = 0.01
"""By so much carriers may give up before their time is over."""

OpenLink = Callable[[int, int], Link]
"""This member's end of the link (sender, receiver). Raises LinkBroken."""


class GroupLinks:
    """Opens links as process groups of two: `GroupLinks(store, "gloo", 10.0)(sender, receiver)` at either end.

    All members must open theirs in the same order of (sender, receiver), since each waits for its other end.
    """

    def __init__(self, store: Store, host: str, backend: str, timeout_s: float, member: int) -> None:
        """
        Args:
            store: a namespace of its own, where members find each other.
            host: an address of the store's machine; links use the interface towards it.
            timeout_s: within which all links have to be open.
            member: this one's number.
        """
        self._store, self._member = store, member
        self._opening = Deadline("links to open", timeout_s)
        self._make = _nccl if backend == "nccl" else _gloo
        self._interface = _interface(host) if backend == "gloo" else None
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def __call__(self, sender: int, receiver: int) -> Link:
        store = PrefixStore(f"{sender}-{receiver}", self._store)
        rank = 0 if self._member == sender else 1
        try:
            group = self._make(store, rank, self._opening, self._interface or self._device)
        except (OSError, RuntimeError) as error:
            other = receiver if rank == 0 else sender
            raise LinkBroken(
                f"member {other} did not open its end of {sender} → {receiver}: {first_line(error)}",
                self._opening.remaining_s < _ROUNDING_S,
                (sender, receiver, -1),
            ) from None
        return _GroupLink(group, 1 - rank, self._device)


class _GroupLink:
    def __init__(self, group: Any, other: int, device: torch.device) -> None:
        self._group, self._other, self.device = group, other, device

    def send(self, flat: torch.Tensor) -> Operation:
        return self._begin("send", flat)

    def receive(self, flat: torch.Tensor) -> Operation:
        return self._begin("recv", flat)

    def _begin(self, what: str, flat: torch.Tensor) -> Operation:
        if self._group is None:
            raise LinkBroken("the link is closed")
        try:
            return _GroupOperation(getattr(self._group, what)([flat], self._other, 0), flat)
        except RuntimeError as error:
            raise LinkBroken(first_line(error)) from None

    def abort(self) -> None:
        group = self._group
        if group is None:
            return
        if self.device.type == "cuda":
            group.abort()
            return
        # gloo has no other way: a wait that ends in vain closes its connection, for all who wait on it.
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], self._other, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()


class _GroupOperation:
    def __init__(self, work: Any, flat: torch.Tensor) -> None:
        # The work does not keep the bytes alive.
        self._work, self._flat = work, flat

    def wait(self, seconds: float) -> None:
        deadline = Deadline("the other end of a link", max(seconds, 0.001))
        try:
            self._work.wait(timedelta(seconds=deadline.seconds))
            if self._flat.is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise LinkBroken(first_line(error), deadline.remaining_s < _ROUNDING_S) from None


def _interface(host: str) -> Any:
    from torch.distributed import ProcessGroupGloo

    # One for all links: each has a thread that waits for its sockets.
    return ProcessGroupGloo.create_device(hostname=own_address_towards(host))


def _left(opening: Deadline) -> timedelta:
    return timedelta(seconds=max(opening.remaining_s, 0.001))


def _gloo(store: Store, rank: int, opening: Deadline, interface: Any) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [interface]
    options._timeout = _left(opening)
    options._threads = 1
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, opening: Deadline, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=opening.seconds)  # that of operations
    # NCCL itself would wait without end for one that does not come.
    store.set(f"here/{rank}", "")
    store.wait([f"here/{1 - rank}"], _left(opening))
    with failures_raise():
        group = ProcessGroupNCCL(store, rank, 2, options)
        # Else the first operation would wait for the other end, whichever link it is due on.
        group.eager_connect_single_device(device)
    return group
