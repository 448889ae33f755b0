"""The resident receiver of an engine rank, without an engine: what its orders leave behind where they fail."""

import time
from typing import Any

import pytest
import torch

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
