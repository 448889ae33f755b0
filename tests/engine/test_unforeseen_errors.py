"""Errors that nobody foresaw: in a call to one of several engines, in the loader inside one, in a hold."""

import asyncio
import json
import logging
from typing import Any

import pytest
import torch

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet
from slimerl.engine.inside import loader
from slimerl.resharding.sync import WeightLease
from slimerl.samples.messages import EngineInfo, HoldReply, HoldRequest, ReleaseRequest

ENGINES = [EngineInfo(f"engine-{number}", "http://127.0.0.1:9", "key", 1) for number in range(2)]


def test_w6_an_error_at_one_engine_is_raised_only_when_no_other_is_at_work() -> None:
    """Fault: the first engine's report is no JSON. A caller that went on would free a bucket that the second reads."""
    done: list[str] = []

    async def load(client: EngineClient) -> None:
        if client.engine_id == "engine-0":
            raise json.JSONDecodeError("injected", "", 0)
        await asyncio.sleep(0.3)
        done.append(client.engine_id)

    with EngineFleet(ENGINES, 5.0) as fleet:
        pending = fleet.start(load)
        with pytest.raises(json.JSONDecodeError, match="injected"):
            pending.results()
        assert done == ["engine-1"]


def message_of(data: bytes) -> list[tuple[str, torch.Tensor]]:
    return [("slimerl", torch.frombuffer(bytearray(data), dtype=torch.uint8))]


@pytest.mark.parametrize("data", [b"{ torn", b"[]", b'{"op": "describe"}'])
def test_the_loader_does_not_end_its_engine_over_a_message_that_is_none(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: what comes is no JSON, or says nothing of where to report."""
    with caplog.at_level(logging.ERROR):
        loader.receive(torch.nn.Linear(1, 1), message_of(data))
    assert "is no message" in caplog.text


def test_the_loader_does_not_end_its_engine_where_it_has_no_number_or_cannot_report(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: SGLang says nothing of the rank; then the sender's store is gone."""
    reply = {"host": "127.0.0.1", "port": 9, "key": "key", "timeout_s": 1.0}
    message = message_of(json.dumps({"op": "describe", "reply": reply}).encode())

    def without_number() -> int:
        raise AssertionError("not initialized")

    monkeypatch.setattr(loader, "tensor_rank", without_number)
    loader.receive(torch.nn.Linear(1, 1), message)
    assert "the rank does not know its number" in caplog.text
    monkeypatch.setattr(loader, "tensor_rank", lambda: 3)
    loader.receive(torch.nn.Linear(1, 1), message)
    assert "rank 3 could not report to 127.0.0.1:9" in caplog.text


class Desk:
    """A rollout role that names engines which cannot be called."""

    def __init__(self) -> None:
        self.released: list[ReleaseRequest] = []

    def hold(self, _request: HoldRequest) -> HoldReply:
        return HoldReply("lease", [EngineInfo("engine-0", "http://[broken", "key", 1)])

    def release(self, request: ReleaseRequest) -> None:
        self.released.append(request)


def test_a_hold_whose_engines_cannot_be_called_is_released() -> None:
    """Fault: an engine's address is none."""
    desk: Any = Desk()
    with pytest.raises(ValueError, match="Invalid IPv6"):
        WeightLease(desk, 7, 10.0, 1.0)
    [release] = desk.released
    assert (release.lease_id, release.version, release.whole) == ("lease", 7, [])
    assert "could not be called: ValueError" in release.dirty["engine-0"]
