"""The connection over which an engine rank answers: used again while its sender lives, never for one that is gone."""

import os

import pytest
from torch.distributed import TCPStore

from slimerl.engine.inside.store import KeptStore


def a_sender(port: int = 0) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_one_connection_serves_many_answers():
    sender, kept = a_sender(), KeptStore()
    kept.at("127.0.0.1", sender.port, 5.0).set("0", "report")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 10):
        kept.at("127.0.0.1", sender.port, 5.0).set(str(number), "report")
    assert len(os.listdir("/proc/self/fd")) == before
    assert [sender.get(str(number)) for number in range(10)] == [b"report"] * 10


def test_another_sender_gets_its_own():
    first, second, kept = a_sender(), a_sender(), KeptStore()
    for sender in (first, second, first):
        kept.at("127.0.0.1", sender.port, 5.0).set("answer", str(sender.port))
        assert sender.get("answer") == str(sender.port).encode()
        sender.delete_key("answer")


def test_a_sender_that_came_back_at_the_same_port_gets_the_answer():
    """Fault: the first one is gone, and what is written to it would be lost in silence."""
    sender, kept = a_sender(), KeptStore()
    port = sender.port
    kept.at("127.0.0.1", port, 5.0).set("0", "lost with it")
    del sender
    again = a_sender(port)
    kept.at("127.0.0.1", port, 5.0).set("1", "report")
    assert again.get("1") == b"report"


def test_a_sender_that_is_gone_is_told_at_once():
    sender, kept = a_sender(), KeptStore()
    port = sender.port
    kept.at("127.0.0.1", port, 5.0)
    del sender
    with pytest.raises(ConnectionRefusedError):
        kept.at("127.0.0.1", port, 600.0)
