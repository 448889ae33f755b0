"""Weights between processes through device memory: CUDA IPC on one GPU, NCCL between two."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from gpu_process import needs_gpus

from slimerl.engine.inside.cuda_bucket import DeviceBucket, read_device_bucket, visible_gpus, why_not_on_device
from slimerl.engine.inside.packed import BucketError
from slimerl.resilience.deadline import Deadline
from slimerl.resilience.processes import die_with_parent

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

ANSWER_S = 60.0


class Reader:
    """Another process that reads buckets."""

    def __init__(self, visible: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_read_buckets, args=(theirs, os.getpid(), visible, list(sys.path)))
        self._process.start()
        theirs.close()

    def read(self, address: Any, tag: bytes, entries: Any, keep: bool = False) -> Any:
        """The tensors in host memory, or the message of the BucketError."""
        self._connection.send((address, tag, entries, keep))
        deadline = Deadline("the reader of a bucket", ANSWER_S)
        if not self._connection.poll(deadline.remaining_s):
            deadline.check()
        return self._connection.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _read_buckets(connection: Connection, parent: int, visible: str | None, path: list[str]) -> None:
    die_with_parent(parent)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    sys.path[:] = path
    kept: list[torch.Tensor] = []
    while True:
        address, tag, entries, keep = connection.recv()
        found: dict[str, Any] = {}

        def reader(tensors: Any, found: dict[str, Any] = found, keep: bool = keep) -> None:
            for name, tensor in tensors:
                found[name] = tensor.cpu().numpy() if tensor.dtype != torch.bfloat16 else tensor.float().cpu().numpy()
                if keep:
                    kept.append(tensor)

        try:
            read_device_bucket(address, tag, entries, reader)
        except BucketError as error:
            connection.send(str(error))
        else:
            connection.send(found)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def bucket() -> Iterator[DeviceBucket]:
    bucket = DeviceBucket(1 << 16, torch.device("cuda", 0))
    yield bucket
    bucket.close()


def test_every_stride_and_dtype_arrives_as_it_was_sent(reader: Reader, bucket: DeviceBucket) -> None:
    base = torch.randn(12, 7, device="cuda")
    sent = [("transposed", base.T), ("bfloat16", base.bfloat16()), ("large", torch.randn(1 << 20, device="cuda"))]
    entries = bucket.fill(b"one", sent)
    found = reader.read(bucket.address(), b"one", entries)
    assert not isinstance(found, str), found
    for name, tensor in sent:
        assert torch.equal(torch.from_numpy(found[name]), tensor.float().cpu()), name


def test_w6_a_reader_notices_that_the_bucket_has_been_reused(reader: Reader, bucket: DeviceBucket) -> None:
    """The sender refills the bucket before the reader has answered."""
    entries = bucket.fill(b"one", [("a", torch.ones(4, device="cuda"))])
    address = bucket.address()
    bucket.fill(b"two", [("a", torch.zeros(4, device="cuda"))])
    assert "reused its bucket before it was read" in reader.read(address, b"one", entries)


def test_w6_a_reader_that_keeps_a_tensor_is_found_out(reader: Reader, bucket: DeviceBucket) -> None:
    """The engine keeps a view of the bucket instead of copying."""
    entries = bucket.fill(b"one", [("a", torch.ones(4, device="cuda"))])
    assert "kept a reference into the shared bucket" in reader.read(bucket.address(), b"one", entries, keep=True)


def test_w7_fifty_uses_leave_device_memory_as_it_was(reader: Reader, bucket: DeviceBucket) -> None:
    """Handles that are opened and never closed."""
    free = []
    for use in range(1, 51):
        tag = use.to_bytes(8, "little")
        entries = bucket.fill(tag, [("a", torch.full((1 << 12,), float(use), device="cuda"))])
        found = reader.read(bucket.address(), tag, entries)
        assert not isinstance(found, str), found
        assert (found["a"] == use).all()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[9] - (8 << 20)


def test_the_route_over_the_device_is_taken_where_the_engine_sees_the_gpu() -> None:
    device = torch.device("cuda", 0)
    assert why_not_on_device(device, {"engine-0": [visible_gpus()]}) is None
    assert "sees no GPU" in str(why_not_on_device(device, {"engine-0": [[]]}))


@needs_gpus(2)
def test_the_readers_numbers_of_the_gpus_may_differ_from_the_senders(bucket: DeviceBucket) -> None:
    reader = Reader(visible="1,0")
    try:
        entries = bucket.fill(b"one", [("a", torch.arange(4.0, device="cuda"))])
        found = reader.read(bucket.address(), b"one", entries)
        assert not isinstance(found, str), found
        assert found["a"].tolist() == [0, 1, 2, 3]
    finally:
        reader.close()


def nccl_member(rank: int, port: int) -> list[float]:
    """Member of a group of two, on the one GPU that it sees."""
    import datetime

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=datetime.timedelta(seconds=60))
    group = dist.ProcessGroupNCCL(store, rank, 2)
    flat = torch.arange(8.0, device="cuda") * (1 if rank == 0 else 0)
    group.broadcast(flat, 0).wait()
    torch.cuda.synchronize()
    return flat.tolist()


@needs_gpus(2)
def test_nccl_broadcasts_from_the_first_member_to_the_second() -> None:
    import torch.distributed as dist
    from gpu_process import in_processes

    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    calls = [(nccl_member, (rank, store.port)) for rank in range(2)]
    first, second = in_processes(calls, gpus=["0", "1"])
    assert first == second == list(range(8))
