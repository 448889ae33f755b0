"""The connection over which an engine rank answers: used again while its sender is the same one, and not for others."""

import os

import pytest
from torch.distributed import TCPStore

from slimerl.engine.inside.store import KeptStore


def a_sender(port: int = 0) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def at(kept: KeptStore, sender: TCPStore, secret: str = "one") -> TCPStore:
    return kept.at("127.0.0.1", sender.port, secret, 5.0)


def test_one_connection_serves_many_answers():
    sender, kept = a_sender(), KeptStore()
    at(kept, sender).set("0", "report")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 10):
        at(kept, sender).set(str(number), "report")
    assert len(os.listdir("/proc/self/fd")) == before
    assert [sender.get(str(number)) for number in range(10)] == [b"report"] * 10


def test_another_sender_gets_its_own():
    first, second, kept = a_sender(), a_sender(), KeptStore()
    for sender in (first, second, first):
        at(kept, sender).set("answer", str(sender.port))
        assert sender.get("answer") == str(sender.port).encode()
        sender.delete_key("answer")


def test_the_next_sender_at_the_same_port_gets_the_answer():
    """Fault: the first one is gone, and what is written to it is lost in silence."""
    sender, kept = a_sender(), KeptStore()
    port = sender.port
    at(kept, sender).set("0", "lost with it")
    del sender
    again = a_sender(port)
    at(kept, again, "another").set("1", "report")
    assert again.get("1") == b"report"


def test_a_sender_that_is_gone_is_told_at_once():
    sender, kept = a_sender(), KeptStore()
    at(kept, sender)
    port = sender.port
    del sender
    with pytest.raises(ConnectionRefusedError):
        kept.at("127.0.0.1", port, "another", 600.0)


def test_a_connection_that_was_idle_for_long_is_not_used_again():
    sender, kept = a_sender(), KeptStore(longest_s=0.0)
    assert at(kept, sender) is not at(kept, sender)
