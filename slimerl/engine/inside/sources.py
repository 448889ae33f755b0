"""Where the tensors of a bucket come from: one reader for each transport, all used alike by the loader.

Flows in: what the sender says of a bucket (`source`), its entries. Flows out: its tensors, in place, to a function that
copies what it wants to keep. Invariant: the tensors are those that were announced, or an error says why not.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slimerl.engine.inside.cuda_bucket import read_device_bucket
from slimerl.engine.inside.packed import BucketError, Entry, NamedTensor, views
from slimerl.engine.inside.shared_bucket import read_bucket
from slimerl.engine.inside.weight_group import GroupAddress, GroupBroken, WeightGroup

Source = dict[str, Any]
Reader = Callable[[Iterator[NamedTensor]], None]


def read_source(source: Source, entries: Sequence[Entry], reader: Reader) -> None:
    """Give `reader` the tensors of a bucket.

    Raises:
        BucketError: the bucket is not what was announced, or cannot be opened.
        GroupBroken: a broadcast did not come to its end.
    """
    _READERS[source["kind"]](source, entries, reader)


def join_group(address: GroupAddress, rank: int) -> None:
    """Become a member of the sender's group; an earlier one, left over from a sender that ended, is closed."""
    leave_group()
    _member.append(WeightGroup(address, rank))


def leave_group() -> None:
    while _member:
        _member.pop().close()


_member: list[WeightGroup] = []
"""At most one; it lasts from one message to the next."""


def _read_shared(source: Source, entries: Sequence[Entry], reader: Reader) -> None:
    read_bucket(source["bucket"], bytes.fromhex(source["tag"]), entries, reader)


def _read_device(source: Source, entries: Sequence[Entry], reader: Reader) -> None:
    read_device_bucket(source["bucket"], bytes.fromhex(source["tag"]), entries, reader)


def _read_broadcast(source: Source, entries: Sequence[Entry], reader: Reader) -> None:
    if not _member or _member[0].key != source["key"]:
        raise BucketError("a broadcast was announced to a group that this rank has not joined")
    group = _member[0]
    # New memory for each bucket: what a model might keep of it instead of copying stays as it is.
    flat = torch.empty(source["nbytes"], dtype=torch.uint8, device=group.device)
    try:
        group.broadcast(flat)
    except GroupBroken:
        leave_group()  # so that the others notice at once
        raise
    reader(views(flat, entries))


def _read_file(source: Source, entries: Sequence[Entry], reader: Reader) -> None:
    from safetensors import SafetensorError, safe_open  # SGLang's own dependency

    path = Path(source["path"])
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != {entry["name"] for entry in entries}:
                raise BucketError(f"{path} does not have the tensors that were announced")
            reader(_checked(file.get_tensor(entry["name"]), entry, path) for entry in entries)
    except (OSError, SafetensorError) as error:
        hint = "" if path.parent.is_dir() else "; the run's directory must be on a file system that the engines share"
        raise BucketError(f"{path} cannot be read ({type(error).__name__}: {error}){hint}") from None


def _checked(tensor: torch.Tensor, entry: Entry, path: Path) -> NamedTensor:
    found = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    if found != (entry["dtype"], entry["shape"]):
        raise BucketError(f"{path}: {entry['name']} is {found}, announced was {(entry['dtype'], entry['shape'])}")
    return entry["name"], tensor


_READERS: dict[str, Callable[[Source, Sequence[Entry], Reader], None]] = {
    "shared": _read_shared,
    "device": _read_device,
    "broadcast": _read_broadcast,
    "file": _read_file,
}
