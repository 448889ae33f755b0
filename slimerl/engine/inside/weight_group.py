"""The process group of a weight broadcast: rank 0 is the sender, behind it all ranks of all engines.

Flows in: where the sender's store is, this process's rank. Flows out: the sender's bytes, on every rank.
Invariants: the group stands apart from every default group of trainer and engine; whatever breaks it ends as
`GroupBroken` within its timeout, never as a hang; a closed group leaves no socket and no thread.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch.distributed import PrefixStore, Store

from slimerl.engine.inside.store import connect_store

SENDER = 0


class GroupBroken(RuntimeError):
    """A member is gone, stands still, or cannot be reached. This process is not to blame."""


class GroupAddress(TypedDict):
    """How a process joins."""

    host: str
    port: int
    key: str
    """Of this group alone: the store serves others."""
    size: int
    backend: str
    """`gloo`, or `nccl` where every member has a GPU of its own."""
    timeout_s: float


class WeightGroup:
    """A member's side; `close` it."""

    def __init__(self, address: GroupAddress, rank: int) -> None:
        """Returns when all members have come.

        Raises:
            GroupBroken: some have not come in time.
        """
        self.key = address["key"]
        self._timeout = timedelta(seconds=address["timeout_s"])
        self.device = torch.device("cuda" if address["backend"] == "nccl" else "cpu")
        try:
            store = connect_store(address["host"], address["port"], address["timeout_s"])
            make = _nccl if address["backend"] == "nccl" else _gloo
            self._group: Any = make(PrefixStore(self.key, store), rank, address, self._timeout)
        except (OSError, RuntimeError) as error:
            raise GroupBroken(f"not all of {address['size']} members came together: {first_line(error)}") from None

    def broadcast(self, flat: torch.Tensor) -> None:
        """Every member's `flat` becomes the sender's. All join, with as many bytes.

        Raises:
            GroupBroken: the bytes may have come in part.
        """
        if self._group is None:
            raise GroupBroken("the group is closed")
        try:
            self._group.broadcast(flat, SENDER, self._timeout).wait()
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise GroupBroken(first_line(error)) from None

    def close(self) -> None:
        """Members that still wait notice at once."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()


def own_address_towards(host: str) -> str:
    """The address of this machine under which `host` reaches it. Raises OSError."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket sends nothing for it
        return probe.getsockname()[0]


def is_this_machine(host: str) -> bool:
    """False also where `host` is not known."""
    try:
        address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]
        return own_address_towards(host) == address
    except OSError:
        return False


def _gloo(store: Store, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Otherwise gloo listens on whatever the machine's name resolves to.
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address_towards(address["host"]))]
    options._timeout = timeout
    options._threads = 1
    return ProcessGroupGloo(store, rank, address["size"], options)


def _nccl(store: Store, rank: int, address: GroupAddress, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with failures_raise():
        return ProcessGroupNCCL(store, rank, address["size"], options)


@contextmanager
def failures_raise() -> Iterator[None]:
    """A group reads these while it is made. By default its watchdog would end the process after a timeout: the
    engine would die because another one does not answer."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
