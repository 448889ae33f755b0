"""A discrete-event model of network cards that move parcels.

Flows in: transfers with their order and dependencies, and the links. Flows out: when each transfer ends.
Invariant: a NIC sends one transfer and receives one at a time; none starts before its sender has the data.

The model, stated in full: NICs are full duplex. A transfer runs at the slower of its two NICs, alone on both, for
bytes / speed * (1 + jitter) + `overhead_s`, jitter drawn uniformly from 0 to `jitter`; what has arrived can be passed
on `latency_s` later. The switches between the NICs never block. A receiver takes, of what is ready for it and whose
sender is idle, what comes first in the plan's order (credits, as RDMA carriers have them).
"""

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

READY = -1
"""`after` of a transfer that can start at once."""


@dataclass(frozen=True)
class Transfers:
    """One entry a transfer; all arrays are equally long."""

    sender: Array
    receiver: Array
    nbytes: Array
    after: Array
    """The transfer that brings the sender its data, or READY."""
    order: Array
    """Lower first, where there is a choice."""

    def __len__(self) -> int:
        return len(self.sender)


def bounce(transfers: Transfers, nic: int, mates: Array, share: float) -> Transfers:
    """Let the `mates` of a slow NIC (GPUs of its node) take in all but `share` of what is planned for it, in turn.

    The copies go to the GPU that wants them over NVLink; what is passed on leaves by the mate that took it in.
    """
    mine = np.flatnonzero(transfers.receiver == nic)
    mine = mine[np.argsort(transfers.order[mine], kind="stable")]
    kept = np.floor(np.arange(1, len(mine) + 1) * share) > np.floor(np.arange(len(mine)) * share)
    moved = mine[~kept]
    receiver = transfers.receiver.copy()
    receiver[moved] = mates[np.arange(len(moved)) % len(mates)]
    sender = transfers.sender.copy()
    following = np.flatnonzero(transfers.after >= 0)
    sender[following] = receiver[transfers.after[following]]
    return replace(transfers, sender=sender, receiver=receiver)


@dataclass(frozen=True)
class Links:
    """What the transfers run on."""

    bytes_per_s: FloatArray
    """[nics], each direction."""
    latency_s: float = 10e-6
    overhead_s: float = 5e-6
    jitter: float = 0.0
    """A transfer takes up to this part longer."""


@dataclass(frozen=True)
class Outcome:
    """What a simulation measured."""

    end_s: FloatArray
    """[transfers]; infinite where it did not end."""
    busy_s: FloatArray = field(repr=False)
    """[2, nics]: time spent sending, and receiving."""

    @property
    def seconds(self) -> float:
        return float(self.end_s.max(initial=0.0))


def simulate(transfers: Transfers, links: Links, seed: int = 0, stop_s: float = np.inf) -> Outcome:
    """Run all transfers, or until `stop_s`. Raises ValueError where some can never start."""
    run = _Run(transfers, links, seed)
    run.to(stop_s)
    if np.isinf(stop_s) and np.isinf(run.end).any():
        stuck = int(np.flatnonzero(np.isinf(run.end))[0])
        raise ValueError(f"transfer {stuck} never gets its data: it waits for transfer {transfers.after[stuck]}")
    return Outcome(np.array(run.end), np.array([run.sent, run.received]))


class _Run:
    """State of one simulation; plain lists, since it touches single elements only."""

    def __init__(self, transfers: Transfers, links: Links, seed: int) -> None:
        count, nics = len(transfers), len(links.bytes_per_s)
        self._links = links
        self._sender: list[int] = transfers.sender.tolist()
        self._receiver: list[int] = transfers.receiver.tolist()
        self._nbytes: list[float] = transfers.nbytes.astype(float).tolist()
        self._order: list[int] = transfers.order.tolist()
        spread = np.random.default_rng(seed).random(count) * links.jitter + 1.0
        self._stretch: list[float] = spread.tolist()
        self._speed: list[float] = links.bytes_per_s.tolist()
        self._next: dict[int, list[int]] = {}
        for transfer in np.flatnonzero(transfers.after >= 0).tolist():
            self._next.setdefault(int(transfers.after[transfer]), []).append(transfer)
        self._sending, self._receiving = [False] * nics, [False] * nics
        self._to_send: list[list[tuple[int, int]]] = [[] for _ in range(nics)]
        self._to_receive: list[list[tuple[int, int]]] = [[] for _ in range(nics)]
        self._started = [False] * count
        self.end = [np.inf] * count
        self.sent, self.received = [0.0] * nics, [0.0] * nics
        self._events: list[tuple[float, int, int]] = []
        for transfer in np.flatnonzero(transfers.after < 0).tolist():
            self._offer(transfer)

    def to(self, stop_s: float) -> None:
        for nic in range(len(self._speed)):
            self._find_for_receiver(nic, 0.0)
        while self._events and self._events[0][0] <= stop_s:
            now, kind, transfer = heappop(self._events)
            sender, receiver = self._sender[transfer], self._receiver[transfer]
            if kind == 0:
                self.end[transfer] = now
                self._sending[sender] = self._receiving[receiver] = False
                for following in self._next.get(transfer, ()):
                    heappush(self._events, (now + self._links.latency_s, 1, following))
                self._find_for_receiver(receiver, now)
                self._find_for_sender(sender, now)
            else:
                self._offer(transfer)
                if not self._receiving[receiver]:
                    self._find_for_sender(sender, now)

    def _offer(self, transfer: int) -> None:
        entry = self._order[transfer], transfer
        heappush(self._to_send[self._sender[transfer]], entry)
        heappush(self._to_receive[self._receiver[transfer]], entry)

    def _find_for_receiver(self, nic: int, now: float) -> None:
        if not self._receiving[nic]:
            self._start_first(self._to_receive[nic], self._sending, self._sender, now)

    def _find_for_sender(self, nic: int, now: float) -> None:
        if not self._sending[nic]:
            self._start_first(self._to_send[nic], self._receiving, self._receiver, now)

    def _start_first(self, waiting: list[tuple[int, int]], busy: list[bool], other: list[int], now: float) -> None:
        """Start the first waiting transfer whose `other` NIC is not `busy`."""
        passed = []
        while waiting:
            entry = heappop(waiting)
            if self._started[entry[1]]:
                continue
            if not busy[other[entry[1]]]:
                self._start(entry[1], now)
                break
            passed.append(entry)
        for entry in passed:
            heappush(waiting, entry)

    def _start(self, transfer: int, now: float) -> None:
        sender, receiver = self._sender[transfer], self._receiver[transfer]
        self._started[transfer] = True
        self._sending[sender] = self._receiving[receiver] = True
        speed = min(self._speed[sender], self._speed[receiver])
        seconds = self._nbytes[transfer] / speed * self._stretch[transfer] + self._links.overhead_s
        self.sent[sender] += seconds
        self.received[receiver] += seconds
        heappush(self._events, (now + seconds, 0, transfer))
