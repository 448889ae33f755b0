"""A discrete-event model of network cards that move parcels.

Flows in: transfers with their order and dependencies, and the links. Flows out: when each transfer ends.
Invariant: a NIC sends one transfer and receives one at a time; none starts before its sender has the data.

The model, stated in full: NICs are full duplex. A transfer runs at the slower of its two NICs, alone on both, for
bytes / speed * (1 + jitter) + `overhead_s`, jitter drawn uniformly from 0 to `jitter`; what has arrived can be passed on
`latency_s` later. The switches between the NICs never block. A receiver takes, of what is ready for it and whose sender
is idle, what comes first in the plan's order (credits, as RDMA carriers have them). Copies to other GPUs of the node
go over NVLink, beside the NICs, in order of arrival, and count for the end.
"""

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Links:
    """What the transfers run on."""

    bytes_per_s: FloatArray
    """[nics], each direction."""
    latency_s: float = 10e-6
    overhead_s: float = 5e-6
    jitter: float = 0.0
    """A transfer takes up to this part longer."""
    node: Array | None = None
    """[nics], -1 for none: NICs of one node may take in for each other (`late_entry`). None: each for itself."""


@dataclass(frozen=True)
class Outcome:
    """What a simulation measured."""

    end_s: FloatArray
    """[transfers]; infinite where it did not end."""
    receiver: Array
    """The NIC that took the transfer in: another than planned after a late entry."""
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
    return Outcome(np.array(run.end), np.array(run.receiver, dtype=np.int64), np.array([run.sent, run.received]))


class _Run:
    """State of one simulation; plain lists, since it touches single elements only."""

    def __init__(self, transfers: Transfers, links: Links, seed: int) -> None:
        count, nics = len(transfers), len(links.bytes_per_s)
        self._links = links
        self._sender: list[int] = transfers.sender.tolist()
        self.receiver: list[int] = transfers.receiver.tolist()
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
        self._late = _LateEntry(transfers, links) if links.node is not None else None
        for transfer in np.lexsort((transfers.order,)).tolist():
            if transfers.after[transfer] < 0:
                self._offer(transfer)

    def to(self, stop_s: float) -> None:
        for nic in range(len(self._speed)):
            self._find_for_receiver(nic, 0.0)
        while self._events and self._events[0][0] <= stop_s:
            now, kind, transfer = heappop(self._events)
            sender, receiver = self._sender[transfer], self.receiver[transfer]
            if kind == 0:
                self.end[transfer] = now
                self._sending[sender] = self._receiving[receiver] = False
                for following in self._next.get(transfer, ()):
                    self._sender[following] = receiver
                    heappush(self._events, (now + self._links.latency_s, 1, following))
                self._find_for_receiver(receiver, now)
                self._find_for_sender(sender, now)
            else:
                self._offer(transfer)
                if not self._receiving[receiver] or self._late is not None:
                    self._find_for_sender(sender, now)

    def _offer(self, transfer: int) -> None:
        entry = self._order[transfer], transfer
        heappush(self._to_send[self._sender[transfer]], entry)
        heappush(self._to_receive[self.receiver[transfer]], entry)

    def _find_for_receiver(self, nic: int, now: float) -> None:
        if self._receiving[nic]:
            return
        if self._late is not None:
            behind = self._late.relieve(nic)
            if behind is not None and self._take(self._to_receive[behind], now, nic):
                return
        self._take(self._to_receive[nic], now, nic)

    def _take(self, waiting: list[tuple[int, int]], now: float, nic: int) -> bool:
        """Start the first waiting transfer whose sender is idle, into `nic`."""
        passed = []
        found = False
        while waiting and not found:
            entry = heappop(waiting)
            if self._started[entry[1]]:
                continue
            if self._sending[self._sender[entry[1]]]:
                passed.append(entry)
            else:
                self._start(entry[1], nic, now)
                found = True
        for entry in passed:
            heappush(waiting, entry)
        return found

    def _find_for_sender(self, nic: int, now: float) -> None:
        if self._sending[nic]:
            return
        waiting, passed = self._to_send[nic], []
        while waiting:
            entry = heappop(waiting)
            if self._started[entry[1]]:
                continue
            receiver = self._open_receiver(entry[1])
            if receiver is not None:
                self._start(entry[1], receiver, now)
                break
            passed.append(entry)
        for entry in passed:
            heappush(waiting, entry)

    def _open_receiver(self, transfer: int) -> int | None:
        planned = self.receiver[transfer]
        if self._late is not None:
            return self._late.best(planned, self._receiving)
        return None if self._receiving[planned] else planned

    def _start(self, transfer: int, receiver: int, now: float) -> None:
        sender = self._sender[transfer]
        self._started[transfer] = True
        if self._late is not None:
            self._late.done(self.receiver[transfer], receiver, self._nbytes[transfer])
        self.receiver[transfer] = receiver
        self._sending[sender] = self._receiving[receiver] = True
        speed = min(self._speed[sender], self._speed[receiver])
        seconds = self._nbytes[transfer] / speed * self._stretch[transfer] + self._links.overhead_s
        self.sent[sender] += seconds
        self.received[receiver] += seconds
        heappush(self._events, (now + seconds, 0, transfer))


class _LateEntry:
    """Which NIC of a node takes a transfer in, decided when it starts: a NIC far behind is relieved by the others."""

    PATIENCE = 2.0
    """Transfers of the largest size by which a NIC must be behind."""

    def __init__(self, transfers: Transfers, links: Links) -> None:
        assert links.node is not None
        self._speed: list[float] = links.bytes_per_s.tolist()
        # What is still to come in decides; it is planned bytes, less what others took.
        left = np.bincount(transfers.receiver, weights=transfers.nbytes, minlength=len(self._speed))
        self._left: list[float] = left.tolist()
        self._node: list[int] = links.node.tolist()
        self._mates: dict[int, list[int]] = {}
        for nic, node in enumerate(self._node):
            if node >= 0:
                self._mates.setdefault(node, []).append(nic)
        self._margin = self.PATIENCE * float(transfers.nbytes.max(initial=0)) / float(links.bytes_per_s.max())

    def _behind(self, nic: int) -> float:
        return self._left[nic] / self._speed[nic]

    def relieve(self, nic: int) -> int | None:
        """The NIC whose transfers `nic` should take, if one is far behind it."""
        if self._node[nic] < 0:
            return None
        worst = max(self._mates[self._node[nic]], key=self._behind)
        return worst if self._behind(worst) > self._behind(nic) + self._margin else None

    def best(self, planned: int, receiving: list[bool]) -> int | None:
        """An idle NIC for a transfer that is planned for `planned`."""
        if self._node[planned] < 0:
            return None if receiving[planned] else planned
        idle = [nic for nic in self._mates[self._node[planned]] if not receiving[nic]]
        if not idle:
            return None
        ahead = min(idle, key=self._behind)
        if self._behind(planned) > self._behind(ahead) + self._margin:
            return ahead
        return None if receiving[planned] else planned

    def done(self, planned: int, taken_by: int, nbytes: float) -> None:
        """`taken_by` takes in what was planned for `planned`."""
        self._left[planned] -= nbytes
