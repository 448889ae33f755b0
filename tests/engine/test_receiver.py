"""The resident receiver of an engine rank, without an engine: what its orders leave behind where they fail."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from slimerl.engine.inside.links import LinkBroken
from slimerl.engine.inside.parcels import encode
from slimerl.engine.inside.receiver import NothingStaged, Receiver
from slimerl.resilience.deadline import Deadline

NAME = "weight"


def contents_order(staged: bool) -> dict[str, Any]:
    """Parcel 7 is all of a parameter of [2, 4]."""
    segment = [7, 0, 0, -1, 0, 2, 0, 4]
    return {
        "op": "contents",
        "names": [NAME],
        "parcels": encode(torch.tensor([[7, 32]])),
        "segments": encode(torch.tensor([segment])),
        "placements": [],
        "staged": staged,
        "backend": "gloo",
    }


def receiver() -> Receiver:
    return Receiver(torch.nn.Linear(4, 2, bias=False), None)  # type: ignore[arg-type]  # nobody sends it orders


def test_contents_are_kept_with_a_staging_buffer_for_their_parcels() -> None:
    assert receiver()._obey(contents_order(staged=True)) == {"ok": True, "staging_bytes": 64}
    assert receiver()._obey(contents_order(staged=False)) == {"ok": True, "staging_bytes": 0}


def test_w2_without_memory_for_staging_no_transfer_may_write_to_the_live_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the device has no room for the staging buffer of new contents."""
    one = receiver()
    one._obey(contents_order(staged=True))

    def no_memory(*_args: Any, **_named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", no_memory)
        assert "injected" in one._obey(contents_order(staged=True))["error"]
    assert "no contents" in one._obey({"op": "transfer"})["error"]
    with pytest.raises(NothingStaged):
        one.commit("any", {})


class Recorded:
    """Traffic that notes how long it was given."""

    steps: list[Any] = []  # noqa: RUF012 (a value)
    given_s = 0.0

    def abort(self) -> None:
        pass

    def run(self, _parcels: Any, deadline: Deadline) -> None:
        self.given_s = deadline.remaining_s

    def close(self) -> None:
        pass


def test_the_time_of_a_transfer_counts_from_its_order_not_from_when_links_were_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: links open slowly. A member that then waited as long again would report after the coordinator had named
    it as silent."""
    traffic = Recorded()

    def slowly(*_args: Any) -> Recorded:
        time.sleep(0.2)
        return traffic

    monkeypatch.setattr("slimerl.engine.inside.receiver.open_traffic", slowly)
    one = receiver()
    one._obey(contents_order(staged=True))
    one._obey({"op": "transfer", "transfer": "one", "links": "some", "backend": "gloo", "timeout_s": 5.0})
    assert 0 < traffic.given_s <= 4.8


class Waiting(Recorded):
    """Traffic of a transfer whose sender is gone: it waits until it is aborted."""

    def __init__(self) -> None:
        self.running, self.aborted = threading.Event(), threading.Event()

    def run(self, _parcels: Any, _deadline: Deadline) -> None:
        self.running.set()
        assert self.aborted.wait(20)
        raise LinkBroken("aborted")

    def abort(self) -> None:
        self.aborted.set()


class Orders:
    """A mailbox: the orders of a list, then none until it is woken."""

    def __init__(self, events: list[str], *orders: dict[str, Any]) -> None:
        self._events, self._orders, self._woken = events, list(orders), threading.Event()

    def next_order(self) -> dict[str, Any]:
        if self._orders:
            return self._orders.pop(0)
        self._woken.wait(20)
        return {"op": "end"}

    def wake(self) -> None:
        self._woken.set()

    def report(self, report: dict[str, Any]) -> None:
        self._events.append("broken" if "broken" in report else "ok")


TRANSFER = {"op": "transfer", "transfer": "one", "links": "some", "backend": "gloo", "timeout_s": 60.0}


def test_a_receiver_that_is_closed_amid_a_transfer_ends_at_once_and_holds_no_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the trainer's machine has vanished, so that no link was closed; its successor opens a new receiver."""
    traffic = Waiting()
    monkeypatch.setattr("slimerl.engine.inside.receiver.open_traffic", lambda *_args: traffic)
    mailbox: Any = Orders([], contents_order(staged=True), TRANSFER)
    one = Receiver(torch.nn.Linear(4, 2, bias=False), mailbox)
    one.start()
    assert traffic.running.wait(20)
    assert one._staging is not None
    buffer = weakref.ref(one._staging)
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5
    assert not one.alive
    gc.collect()
    assert buffer() is None


def test_a_broken_transfer_is_reported_before_its_links_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a link breaks. The coordinator waits for the report, and closing a thousand links takes seconds."""
    events: list[str] = []

    class Broken(Recorded):
        def run(self, _parcels: Any, _deadline: Deadline) -> None:
            raise LinkBroken("the other end is gone")

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr("slimerl.engine.inside.receiver.open_traffic", lambda *_args: Broken())
    mailbox: Any = Orders(events)
    one = Receiver(torch.nn.Linear(4, 2, bias=False), mailbox)
    one._answer(contents_order(staged=True))
    one._answer(TRANSFER)
    assert events == ["ok", "broken", "closed"]
