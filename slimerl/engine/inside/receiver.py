"""A resident receiver: the thread of an engine rank that takes parcels while the engine generates.

Flows in: the coordinator's orders (`mailbox.py`). Flows out: parcels in a staging buffer, or straight in the live
parameters; reports. Invariants: nothing but a `commit`, made by the engine's own thread while it is paused, touches
live parameters of a staged update; a rank has one receiver; it ends when its coordinator is gone or another one comes;
it never raises into the engine.

Orders (`op`):
- `contents`: which boxes of which parcels are this rank's; checked against the live parameters, and kept.
- `transfer`: the steps of one transfer (kept as long as they stay the same) and when to give up.
- `end`: the thread ends.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from slimerl.engine.inside.carry import Relay, Staged, Step, Traffic
from slimerl.engine.inside.links import GroupLinks, LinkBroken, broken_report
from slimerl.engine.inside.mailbox import CoordinatorGone, Mailbox
from slimerl.engine.inside.parcels import Contents, box_of, checksum, decode, encode, write
from slimerl.resilience.deadline import Deadline, DeadlineExceeded

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Weights = Mapping[str, torch.Tensor]

_JOIN_S = 10.0


class NothingStaged(RuntimeError):
    """A commit asks for a transfer that has not come to its end here."""


class Misfit(ValueError):
    """The live parameters do not have the boxes that the plan writes."""


class Receiver:
    """One rank's. `start` returns at once; `commit` is called while the engine is paused."""

    def __init__(self, model: torch.nn.Module, mailbox: Mailbox) -> None:
        self._model, self._mailbox = model, mailbox
        self._stop = threading.Event()
        self._contents: Contents | None = None
        self._placements: list[Message] = []
        self._staging: torch.Tensor | None = None
        self._slots: dict[int, tuple[int, int]] = {}
        self._traffic: tuple[str, Traffic] | None = None
        self._done: str | None = None
        """The transfer that came to its end last."""
        self._checksums: dict[int, int] = {}
        self._written = 0
        self._weights: Weights = {}
        self._thread = threading.Thread(target=self._serve, name="slimerl-receiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def placements(self) -> list[Message]:
        """What the rank holds of each tensor, for the digest."""
        return self._placements

    def close(self) -> None:
        """Until the thread has ended; from now on it writes nothing.

        A transfer that is under way ends at once: it would hold its buffer as long as it waited for a sender that is
        gone, beside the buffer of the next receiver.
        """
        self._stop.set()
        traffic = self._traffic  # the thread may close it meanwhile
        if traffic is not None:
            traffic[1].abort()
        self._mailbox.wake()
        self._thread.join(_JOIN_S)
        self._staging = None

    def commit(self, transfer: str, weights: Weights) -> int:
        """Write what was staged into the live parameters; returns the bytes written. Not staged: they are there.

        Raises:
            NothingStaged: that transfer did not come to its end here.
        """
        if self._done != transfer or self._contents is None:
            raise NothingStaged(f"transfer {transfer} has not arrived here; the last that has is {self._done}")
        if self._staging is None:
            return self._written
        written = 0
        for parcel, segments in self._contents.segments.items():
            begin, nbytes = self._slots[parcel]
            written += write(self._staging[begin : begin + nbytes], segments, weights)
        return written

    # --- the thread

    def _serve(self) -> None:
        try:
            with torch.no_grad(), _own_stream(self._model):
                while not self._stop.is_set():
                    order = self._mailbox.next_order()
                    if self._stop.is_set() or order["op"] == "end":
                        return
                    self._answer(order)
        except CoordinatorGone as gone:
            logger.info("slimerl: the receiver of weights ends: %s", gone)
        finally:
            self._close_traffic()
            self._staging = None

    def _answer(self, order: Message) -> None:
        """First the report, which is waited for; then the links, of which many take long to close, so that the others
        notice."""
        report = self._obey(order)
        if not self._stop.is_set():
            self._mailbox.report(report)
        if "broken" in report or not report["ok"]:
            self._close_traffic()

    def _obey(self, order: Message) -> Message:
        try:
            report = {"contents": self._take_contents, "transfer": self._transfer}[order["op"]](order)
            return {"ok": True, **report}
        except (LinkBroken, DeadlineExceeded) as error:
            return broken_report(error)
        except Exception as error:
            logger.exception("slimerl: %s failed", order["op"])
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _take_contents(self, order: Message) -> Message:
        contents = Contents.of(order)
        weights = live_weights(self._model)
        for segments in contents.segments.values():
            for segment in segments:
                if segment.name not in weights:
                    raise Misfit(f"the engine has no parameter {segment.name}")
                if box_of(weights[segment.name], segment).shape != (segment.rows, segment.columns):
                    raise Misfit(f"{segment.name} is {tuple(weights[segment.name].shape)} and has no box {segment}")
        self._close_traffic()
        # Before the new ones are made: where memory does not suffice, no transfer may take the rank for one without
        # staging.
        self._contents = self._done = self._staging = None
        begins, size = contents.slots()
        self._slots = {parcel: (begin, contents.nbytes[parcel]) for parcel, begin in begins.items()}
        if order["staged"]:
            self._staging = torch.zeros(size, dtype=torch.uint8, device=_device_of(order["backend"]))
        self._contents, self._placements = contents, order["placements"]
        return {"staging_bytes": size if order["staged"] else 0}

    def _transfer(self, order: Message) -> Message:
        if self._contents is None:
            raise NothingStaged("no contents have been given to this rank")
        begun = time.monotonic()
        deadline = Deadline(f"transfer {order['transfer']}", order["timeout_s"])
        self._done, self._checksums, self._written = None, {}, 0
        self._weights = live_weights(self._model)
        traffic = self._opened(order)
        if self._stop.is_set():  # too early for `close` to abort it
            raise LinkBroken("the receiver was closed")
        device = _device_of(order["backend"])
        parcels = (
            Relay(traffic.steps, self._stored, device)
            if self._staging is None
            else Staged(traffic.steps, self._kept, self._staging, self._slots)
        )
        traffic.run(parcels, deadline)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if missing := self._contents.nbytes.keys() - self._checksums.keys():
            raise NothingStaged(f"parcels {sorted(missing)[:5]} were in no step of transfer {order['transfer']}")
        self._done = order["transfer"]
        found = torch.tensor(list(self._checksums.items()), dtype=torch.int64)
        received = sum(step.nbytes for step in traffic.steps if not step.sends)
        return {"checksums": encode(found), "seconds": time.monotonic() - begun, "received_bytes": received}

    def _opened(self, order: Message) -> Traffic:
        if self._traffic is not None and self._traffic[0] == order["links"]:
            return self._traffic[1]
        self._close_traffic()
        traffic = open_traffic(self._mailbox, order)
        self._traffic = order["links"], traffic
        return traffic

    def _close_traffic(self) -> None:
        if self._traffic is not None:
            self._traffic[1].close()
            self._traffic = None

    def _kept(self, parcel: int, flat: torch.Tensor) -> None:
        self._checksums[parcel] = checksum(flat)

    def _stored(self, parcel: int, flat: torch.Tensor) -> None:
        self._checksums[parcel] = checksum(flat)
        assert self._contents is not None
        if not self._stop.is_set():
            self._written += write(flat, self._contents.segments.get(parcel, ()), self._weights)


def open_traffic(mailbox: Mailbox, order: Message) -> Traffic:
    """A member's links for the steps of an order `transfer`. Raises LinkBroken."""
    rows = decode(order["steps"]).view(-1, 4).tolist()
    steps = [Step(bool(sends), peer, parcel, nbytes) for sends, peer, parcel, nbytes in rows]
    store = mailbox.namespace(order["links"])
    links = GroupLinks(store, mailbox.host, order["backend"], order["open_s"], order["member"])
    return Traffic(order["member"], steps, links)


def live_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def _device_of(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _own_stream(model: torch.nn.Module) -> Any:
    """Copies beside generation, not in its queue."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return torch.cuda.stream(None)
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))


_receivers: list[Receiver] = []
"""At most one; it lasts from one message to the next."""


def open_receiver(model: torch.nn.Module, message: Message, rank: int) -> None:
    """In place of an earlier one, whose coordinator ended."""
    while _receivers:
        _receivers.pop().close()
    member = f"{message['receiver']}/{rank}"
    receiver = Receiver(
        model, Mailbox(message["host"], message["port"], message["prefix"], member, message["timeout_s"])
    )
    receiver.start()
    _receivers.append(receiver)


def the_receiver() -> Receiver:
    """Raises NothingStaged: none was opened."""
    if not _receivers:
        raise NothingStaged("no receiver was opened in this rank")
    return _receivers[0]
