"""Links of two members: what is sent arrives in order; who dies, hangs or never comes breaks its own links alone."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from slimerl.engine.inside.carry import Relay, Step, Traffic
from slimerl.engine.inside.links import GroupLinks, LinkBroken
from slimerl.resilience.deadline import Deadline

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def links(store, name, member, open_s=5.0):
    own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
    return GroupLinks(PrefixStore(name, own), "127.0.0.1", "gloo", open_s, member)


def pair(store, name):
    """Both ends of 0 → 1."""
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(links(store, name, member), 0, 1) for member in (0, 1)]
        return [end.result(20) for end in ends]


def test_parcels_arrive_in_the_order_in_which_they_were_sent(store):
    sender, receiver = pair(store, "order")
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 1000, 1 << 20)]
    found = [torch.zeros_like(flat) for flat in sent]
    receiving = [receiver.receive(flat) for flat in found]
    for operation in [*[sender.send(flat) for flat in sent], *receiving]:
        operation.wait(10)
    assert all(torch.equal(*both) for both in zip(sent, found, strict=True))


def test_an_end_that_is_closed_is_noticed_at_once(store):
    sender, receiver = pair(store, "closed")
    operation = receiver.receive(torch.zeros(8, dtype=torch.uint8))
    began = time.monotonic()
    sender.close()
    with pytest.raises(LinkBroken):
        operation.wait(10)
    assert time.monotonic() - began < 5
    with pytest.raises(LinkBroken, match="closed"):
        sender.send(torch.zeros(8, dtype=torch.uint8))


def test_an_end_that_stands_still_breaks_the_link_in_time(store):
    _sender, receiver = pair(store, "still")
    began = time.monotonic()
    with pytest.raises(LinkBroken, match="Timed out"):
        receiver.receive(torch.zeros(8, dtype=torch.uint8)).wait(0.5)
    assert time.monotonic() - began < 5


def test_an_end_that_never_comes_is_named(store):
    with pytest.raises(LinkBroken, match="member 1 did not open its end of 0 → 1"):
        links(store, "alone", 0, open_s=0.5)(0, 1)


def test_what_waits_on_a_link_ends_at_once_where_another_thread_aborts_it(store):
    """Fault: the other end has vanished without closing anything."""
    _sender, receiver = pair(store, "aborted")
    traffic = Traffic(1, [Step(False, 0, 7, 64)], lambda *_ends: receiver)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(traffic.run, Relay(traffic.steps, lambda *_: None, CPU), Deadline("it", 20))
        with pytest.raises(TimeoutError):
            running.result(0.2)
        traffic.abort()
        with pytest.raises(LinkBroken) as broken:
            running.result(5)
    assert (broken.value.hop, broken.value.stood_still) == ((0, 1, 7), False)


def test_traffic_that_breaks_names_the_hop_and_whether_it_stood_still(store):
    """Fault: of three members in a row the middle one passes nothing on."""
    steps = {
        0: [Step(True, 1, 7, 64)],
        1: [Step(False, 0, 7, 64), Step(True, 2, 7, 64)],
        2: [Step(False, 1, 7, 64)],
    }
    with ThreadPoolExecutor(3) as threads:
        opened = [threads.submit(Traffic, member, steps[member], links(store, "row", member)) for member in steps]
        traffic = [one.result(20) for one in opened]
        last = threads.submit(traffic[2].run, Relay(steps[2], lambda *_: None, CPU), Deadline("it", 20))
        traffic[1].close()
        with pytest.raises(LinkBroken, match="1 → 2, parcel 7") as closed:
            last.result(10)
    assert (closed.value.hop, closed.value.stood_still) == ((1, 2, 7), False)
    _sender, receiver = pair(store, "late")
    waiting = Traffic(1, [Step(False, 0, 7, 64)], lambda *_ends: receiver)
    with pytest.raises(LinkBroken) as late:
        waiting.run(Relay(waiting.steps, lambda *_: None, CPU), Deadline("it", 0.2))
    assert (late.value.hop, late.value.stood_still) == ((0, 1, 7), True)
    receiver.close()
    with pytest.raises(LinkBroken) as gone:
        waiting.run(Relay(waiting.steps, lambda *_: None, CPU), Deadline("it", 0.2))
    assert (gone.value.hop, gone.value.stood_still) == ((0, 1, 7), False)


class Closable:
    device = CPU
    closed = False

    def close(self):
        self.closed = True


def test_links_that_are_open_are_closed_where_another_cannot_be_made():
    """Fault: something else than the other end fails while links are opened."""
    first = Closable()

    def open_link(_sender, receiver):
        if receiver == 2:
            raise MemoryError("injected")
        return first

    with pytest.raises(MemoryError):
        Traffic(0, [Step(True, 1, 7, 64), Step(True, 2, 7, 64)], open_link)
    assert first.closed


def test_closed_links_leave_no_thread_and_no_socket(store):
    pair(store, "warm")[0].close()

    def taken():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    before = taken()
    for number in range(5):
        ends = pair(store, f"many {number}")
        threads = [threading.Thread(target=end.close) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del ends
    Deadline("sockets to close", 10).wait_until(lambda: taken() <= before)
