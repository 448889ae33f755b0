"""The shared memory between a sender and the engines, without an engine."""

import os
from collections.abc import Iterator

import pytest
import torch

from slimerl.engine.inside.packed import BucketError, packed_bytes
from slimerl.engine.inside.shared_bucket import SharedBucket, read_bucket

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture
def bucket() -> Iterator[SharedBucket]:
    bucket = SharedBucket(1 << 16)
    yield bucket
    bucket.close()


def read(bucket: SharedBucket, tag: bytes, entries: list) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    copies = lambda tensors: found.update((name, tensor.clone()) for name, tensor in tensors)  # noqa: E731
    read_bucket(bucket.address, tag, entries, copies)
    return found


def test_every_dtype_and_stride_comes_out_as_it_went_in(bucket: SharedBucket) -> None:
    base = torch.randn(12, 7)
    sent: Tensors = [
        ("transposed", base.T),
        ("every second column", base[:, ::2]),
        ("bfloat16", base.bfloat16()),
        ("fp8", base.to(torch.float8_e4m3fn)),
        ("bytes", torch.arange(5, dtype=torch.uint8)),
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.zeros(0, 4)),
    ]
    found = read(bucket, b"one", bucket.fill(b"one", sent))
    assert list(found) == [name for name, _ in sent]
    for name, tensor in sent:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


def test_a_tensor_larger_than_the_bucket_makes_it_grow(bucket: SharedBucket) -> None:
    large: Tensors = [("large", torch.randn(1 << 16))]
    assert packed_bytes(large) > 1 << 16
    found = read(bucket, b"one", bucket.fill(b"one", large))
    assert torch.equal(found["large"], large[0][1])


def test_w6_a_reader_notices_that_the_bucket_has_been_reused_before_it_reads(bucket: SharedBucket) -> None:
    entries = bucket.fill(b"one", [("a", torch.ones(4))])
    bucket.fill(b"two", [("a", torch.zeros(4))])
    with pytest.raises(BucketError, match="reused its bucket before it was read"):
        read(bucket, b"one", entries)


def test_w6_a_reader_notices_that_the_bucket_is_reused_while_it_reads(bucket: SharedBucket) -> None:
    entries = bucket.fill(b"one", [("a", torch.ones(4))])

    def slow_reader(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        bucket.fill(b"two", [("a", torch.zeros(4))])
        for _name, tensor in tensors:
            tensor.clone()

    with pytest.raises(BucketError, match="reused its bucket while it was read"):
        read_bucket(bucket.address, b"one", entries, slow_reader)


def test_w6_a_reader_that_keeps_a_tensor_instead_of_copying_it_is_found_out(bucket: SharedBucket) -> None:
    kept: list[torch.Tensor] = []
    entries = bucket.fill(b"one", [("a", torch.ones(4))])
    with pytest.raises(BucketError, match="kept a reference into the shared bucket"):
        read_bucket(bucket.address, b"one", entries, lambda tensors: kept.extend(tensor for _, tensor in tensors))


def test_a_bucket_whose_sender_is_gone_cannot_be_opened() -> None:
    bucket = SharedBucket(64)
    entries = bucket.fill(b"one", [("a", torch.ones(4))])
    address = bucket.address
    bucket.close()
    with pytest.raises(BucketError, match="cannot open the sender's bucket"):
        read_bucket(address, b"one", entries, list)


def test_another_file_under_the_same_descriptor_is_not_taken_for_the_bucket() -> None:
    bucket = SharedBucket(64)
    entries, address = bucket.fill(b"one", [("a", torch.ones(4))]), bucket.address
    bucket.close()
    number = int(address["path"].rpartition("/")[2])
    other = os.memfd_create("other")
    os.dup2(other, number)
    try:
        with pytest.raises(BucketError, match="no longer the bucket that was announced"):
            read_bucket(address, b"one", entries, list)
    finally:
        os.close(other)
        if number != other:
            os.close(number)


def test_w7_filling_and_reading_leaks_no_descriptor_and_no_mapping(bucket: SharedBucket) -> None:
    def held() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("slimerl-bucket" in line for line in maps)

    before = held()
    for use in range(1, 21):
        tag = use.to_bytes(8, "little")
        read(bucket, tag, bucket.fill(tag, [("a", torch.randn(64))]))
    assert held() == before
