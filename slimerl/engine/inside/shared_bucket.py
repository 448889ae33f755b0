"""Host memory that a sender fills with tensors and the engine ranks of the same machine read in place.

The memory is anonymous (`memfd`): a reader opens it through the sender's `/proc` entry, it has no name in /dev/shm,
and the kernel frees it with its last user, however that one ends.

Lifecycle of one use: `fill` (tag taken off, tensors copied, tag put on) → readers map it (`read_bucket`) and copy
→ every reader has answered → the next `fill`. The tag tells a reader when a sender broke that order: it is checked
before the first and after the last byte is read. Layout: `HEADER_BYTES` with the tag, then the tensors, each aligned.
"""

import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import torch

from slimerl.engine.inside.packed import BucketError, Entry, NamedTensor, aligned, pack, packed_bytes, views

HEADER_BYTES = 64
_NO_TAG = bytes(HEADER_BYTES)


class Address(TypedDict):
    """How a process of the same user on the same machine opens the memory."""

    path: str
    inode: int
    nbytes: int


class SharedBucket:
    """The sender's side. Grows to the largest use."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("slimerl-bucket", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._resize(nbytes)

    def _resize(self, nbytes: int) -> None:
        self._nbytes = HEADER_BYTES + aligned(nbytes)
        os.ftruncate(self._file, self._nbytes)
        self._map = mmap.mmap(self._file, self._nbytes)

    @property
    def address(self) -> Address:
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._file}",
            "inode": os.fstat(self._file).st_ino,
            "nbytes": self._nbytes,
        }

    def fill(self, tag: bytes, tensors: Sequence[NamedTensor]) -> list[Entry]:
        """Copy tensors in: any strides, any device. No reader may still be reading.

        Args:
            tag: at most `HEADER_BYTES`, different for every use.
        """
        if not 0 < len(tag) <= HEADER_BYTES or not any(tag):
            raise ValueError(f"a tag has 1 to {HEADER_BYTES} bytes, not all zero; found {tag!r}")
        if HEADER_BYTES + packed_bytes(tensors) > self._nbytes:
            self._resize(packed_bytes(tensors))
        assert self._map is not None
        self._map[:HEADER_BYTES] = _NO_TAG
        entries = pack(torch.frombuffer(self._map, dtype=torch.uint8)[HEADER_BYTES:], tensors)
        self._map[:HEADER_BYTES] = tag.ljust(HEADER_BYTES, b"\0")
        return entries

    def close(self) -> None:
        """Readers that have it open keep it; nobody else can open it any more."""
        if self._map is not None:
            self._map = None
            os.close(self._file)


def read_bucket(
    address: Address, tag: bytes, entries: Sequence[Entry], reader: Callable[[Iterator[NamedTensor]], None]
) -> None:
    """The reader's side: give `reader` the tensors, in place; it must copy what it wants to keep.

    Raises:
        BucketError: the sender is gone, the bucket is of another use, or something still points into it afterwards.
    """
    memory_map = _map(address)
    _check_tag(memory_map, tag, "before it was read")
    reader(views(torch.frombuffer(memory_map, dtype=torch.uint8)[HEADER_BYTES:], entries))
    _check_tag(memory_map, tag, "while it was read")
    # A tensor keeps the map that it points into alive; closing the map would pull the memory from under it.
    alive = weakref.ref(memory_map)
    del memory_map
    if alive() is not None and gc.collect() >= 0 and alive() is not None:
        raise BucketError(
            "the engine kept a reference into the shared bucket instead of copying: its weights would change with it"
        )


def _map(address: Address) -> mmap.mmap:
    try:
        file = os.open(address["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BucketError(
            f"cannot open the sender's bucket {address['path']}: {error.strerror}; "
            "sender and engine must run on one machine as one user, and the sender must still be alive"
        ) from None
    try:
        status = os.fstat(file)
        if (status.st_ino, status.st_size) != (address["inode"], address["nbytes"]):
            raise BucketError(f"{address['path']} is no longer the bucket that was announced")
        return mmap.mmap(file, address["nbytes"], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(file)


def _check_tag(memory_map: mmap.mmap, tag: bytes, when: str) -> None:
    if memory_map[:HEADER_BYTES] != tag.ljust(HEADER_BYTES, b"\0"):
        raise BucketError(f"the sender reused its bucket {when}; the weights in it are not what was announced")
