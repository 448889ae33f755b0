"""The broadcast group, without an engine: two members in two threads."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from slimerl.engine.inside.store import connect_store
from slimerl.engine.inside.weight_group import (
    GroupAddress,
    GroupBroken,
    WeightGroup,
    failures_raise,
    is_this_machine,
    own_address_towards,
)

TIMEOUT_S = 30.0
"""Far above what anything here takes, also on a busy machine."""
SHORT_S = 1.0
"""Where the timeout is to pass."""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


def address(store: TCPStore, key: str, size: int = 2, timeout_s: float = TIMEOUT_S) -> GroupAddress:
    return {
        "host": "127.0.0.1",
        "port": store.port,
        "key": key,
        "size": size,
        "backend": "gloo",
        "timeout_s": timeout_s,
    }


def received(where: GroupAddress, rank: int, times: int) -> list[int]:
    group, flat = WeightGroup(where, rank), torch.zeros(1 << 16, dtype=torch.uint8)
    found = []
    for _ in range(times):
        group.broadcast(flat)
        found.append(int(flat.unique()))
    group.close()
    return found


def test_one_group_carries_every_bucket_of_an_update(store: TCPStore) -> None:
    where = address(store, "one")
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(received, where, 1, 3)
        group = WeightGroup(where, 0)
        for value in (1, 2, 3):
            group.broadcast(torch.full((1 << 16,), value, dtype=torch.uint8))
        assert answer.result(TIMEOUT_S) == [1, 2, 3]
        group.close()


def test_a_member_that_never_comes_breaks_the_group_in_time(store: TCPStore) -> None:
    began = time.monotonic()
    with pytest.raises(GroupBroken, match="not all of 2 members came together"):
        WeightGroup(address(store, "alone", timeout_s=SHORT_S), 0)
    assert time.monotonic() - began < TIMEOUT_S


def test_a_member_that_closes_breaks_the_group_at_once(store: TCPStore) -> None:
    where = address(store, "closed")
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(received, where, 1, 2)
        group = WeightGroup(where, 0)
        group.broadcast(torch.ones(1 << 16, dtype=torch.uint8))
        group.close()
        began = time.monotonic()
        with pytest.raises(GroupBroken):
            answer.result(2 * TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        with pytest.raises(GroupBroken, match="is closed"):
            group.broadcast(torch.ones(1, dtype=torch.uint8))


def test_a_store_that_is_gone_is_noticed_at_once(store: TCPStore) -> None:
    """Fault: the sender has ended. torch alone would try again until the timeout, and the engine would stand still."""
    port = store.port
    connect_store("127.0.0.1", port, TIMEOUT_S).set("key", "value")
    del store
    began = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        connect_store("127.0.0.1", 1, 60.0)
    assert time.monotonic() - began < 10


def test_this_machine_is_told_from_others() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")
    assert not is_this_machine("no-such-host.invalid")
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


def test_nccl_is_made_so_that_a_timeout_raises_and_nothing_of_it_stays_in_the_environment() -> None:
    before = dict(os.environ)
    with failures_raise():
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert dict(os.environ) == before
