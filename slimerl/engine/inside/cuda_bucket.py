"""Device memory that a sender fills with tensors and engine ranks of the same machine read in place (CUDA IPC).

The counterpart of `shared_bucket.py` for weights that lie on a GPU: no byte passes through the host. A reader maps the
sender's allocation; it finds the GPU by its UUID, since the same GPU may have another number in each process.

Lifecycle of one use: `fill` (tag taken off, tensors copied, tag put on) → one `address` for each reader, which maps the
memory and copies → every reader has answered → the next `fill`. The tag is checked before the first and after the last
byte is read. Layout: `HEADER_BYTES` with the tag, then the tensors, each aligned.
"""

import base64
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor, reduce_tensor

from slimerl.engine.inside.packed import BucketError, Entry, NamedTensor, aligned, pack, packed_bytes, views
from slimerl.engine.inside.shared_bucket import HEADER_BYTES


class DeviceAddress(TypedDict):
    """How one reader opens the memory, once."""

    gpu: str
    """UUID of the sender's GPU."""
    nbytes: int
    handle: dict[str, Any]
    """What torch needs to map it; bytes in base64."""


_HANDLE = (
    *("storage_handle", "storage_size_bytes", "storage_offset_bytes"),
    *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
)
"""Names of what torch's `reduce_tensor` gives for a one-dimensional uint8 tensor, beside its shape and device."""
_OFFSET, _DEVICE, _HANDLE_AT = 3, 6, (7, 8, 9, 11, 12, 13, 14)
"""Places of these in its result: (class, size, stride, offset, storage class, dtype, device, handle, size, offset,
requires_grad, counter, counter offset, event, event needed)."""


def gpu_uuid(device: torch.device) -> str:
    """Identifies the GPU over all processes and machines."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process sees, by their numbers here."""
    return [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def why_not_on_device(device: torch.device, ranks: Mapping[str, Sequence[Sequence[str]]]) -> str | None:
    """Why a sender on `device` must go through host memory, None where it need not.

    Args:
        ranks: by engine, for each rank the UUIDs of the GPUs that it sees.
    """
    if device.type != "cuda":
        return f"the weights lie on {device}"
    own = gpu_uuid(device)
    for engine_id, seen_by_rank in ranks.items():
        for rank, seen in enumerate(seen_by_rank):
            if own not in seen:
                what = f"GPUs {', '.join(seen)}" if seen else "no GPU"
                return f"{engine_id} rank {rank} sees {what}, but not the sender's {own} (CUDA_VISIBLE_DEVICES)"
    return None


class DeviceBucket:
    """The sender's side. Grows to the largest use; not while anybody reads."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._gpu = gpu_uuid(device)
        self._flat = torch.zeros(HEADER_BYTES + aligned(nbytes), dtype=torch.uint8, device=device)

    def fill(self, tag: bytes, tensors: Sequence[NamedTensor]) -> list[Entry]:
        """Copy tensors in: any strides, any device. No reader may still be reading.

        Args:
            tag: at most `HEADER_BYTES`, different for every use.
        """
        if not 0 < len(tag) <= HEADER_BYTES or not any(tag):
            raise ValueError(f"a tag has 1 to {HEADER_BYTES} bytes, not all zero; found {tag!r}")
        needed = HEADER_BYTES + packed_bytes(tensors)
        if needed > len(self._flat):
            self._flat = torch.zeros(needed, dtype=torch.uint8, device=self._flat.device)
        torch.cuda.ipc_collect()  # what the readers of the last use have let go
        self._flat[:HEADER_BYTES] = 0
        entries = pack(self._flat[HEADER_BYTES:], tensors)
        self._flat[:HEADER_BYTES] = _padded(tag).to(self._flat.device)
        torch.cuda.synchronize(self._flat.device)  # readers are other processes, with streams of their own
        return entries

    def address(self) -> DeviceAddress:
        """For one reader: torch counts those that have the memory open."""
        _, parts = reduce_tensor(self._flat)
        return {"gpu": self._gpu, "nbytes": len(self._flat), "handle": _to_json(parts)}

    def close(self) -> None:
        self._flat = self._flat[:0].clone()
        torch.cuda.ipc_collect()


def read_device_bucket(
    address: DeviceAddress,
    tag: bytes,
    entries: Sequence[Entry],
    reader: Callable[[Iterator[NamedTensor]], None],
) -> None:
    """The reader's side: give `reader` the tensors, in place; it must copy what it wants to keep.

    Raises:
        BucketError: the GPU is not visible, the memory cannot be opened, the bucket is of another use, or something
            still points into it afterwards.
    """
    flat = _open(address)
    _check_tag(flat, tag, "before it was read")
    reader(views(flat[HEADER_BYTES:], entries))
    torch.cuda.synchronize(flat.device)
    _check_tag(flat, tag, "while it was read")
    storage = StorageWeakRef(flat.untyped_storage())
    del flat
    kept = not storage.expired() and gc.collect() >= 0 and not storage.expired()
    torch.cuda.ipc_collect()
    if kept:
        raise BucketError(
            "the engine kept a reference into the shared bucket instead of copying: its weights would change with it"
        )


def _open(address: DeviceAddress) -> torch.Tensor:
    index = local_index(address["gpu"], visible_gpus())
    try:
        return rebuild_cuda_tensor(*_from_json(address["handle"], address["nbytes"], index))
    except RuntimeError as error:
        raise BucketError(
            f"cannot open the sender's memory on {address['gpu']}: {error}; sender and engine must run on one machine, "
            "in one container, and the sender must still be alive"
        ) from None


def local_index(gpu: str, visible: Sequence[str]) -> int:
    """This process's number of a GPU. Raises BucketError where it does not see it."""
    if gpu not in visible:
        raise BucketError(
            f"the sender's GPU {gpu} is not visible here; visible are {', '.join(visible) or 'none'} "
            "(CUDA_VISIBLE_DEVICES of the engine)"
        )
    return visible.index(gpu)


def _to_json(parts: Sequence[Any]) -> dict[str, Any]:
    values = [parts[at] for at in _HANDLE_AT]
    coded = [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in values]
    return {"offset": parts[_OFFSET], **dict(zip(_HANDLE, coded, strict=True))}


def _from_json(handle: Mapping[str, Any], nbytes: int, device: int) -> tuple[Any, ...]:
    """The arguments of torch's `rebuild_cuda_tensor`, with this process's number of the GPU."""
    size, stride = torch.Size([nbytes]), (1,)
    head = (torch.Tensor, size, stride, handle["offset"], torch.storage.TypedStorage, torch.uint8, device)
    values = {name: _decoded(handle[name]) for name in _HANDLE}
    memory = tuple(values[name] for name in _HANDLE[:3])
    return (*head, *memory, False, *(values[name] for name in _HANDLE[3:]))


def _decoded(value: Any) -> Any:
    return base64.b64decode(value) if isinstance(value, str) else value


def _padded(tag: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(tag.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _check_tag(flat: torch.Tensor, tag: bytes, when: str) -> None:
    if not torch.equal(flat[:HEADER_BYTES].cpu(), _padded(tag)):
        raise BucketError(f"the sender reused its bucket {when}; the weights in it are not what was announced")
