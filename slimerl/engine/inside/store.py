"""Connecting to the sender's store, without waiting for a sender that is gone.

Flows in: where it listens. Flows out: a client of torch's TCPStore.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore

_CONNECT_S = 5.0


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of its own: waits on one connection block each other.

    Raises:
        OSError: nobody listens there; at once, where torch would try again until the timeout.
        RuntimeError: whoever listens there is no store, or does not answer in time.
    """
    socket.create_connection((host, port), min(_CONNECT_S, timeout_s)).close()
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class KeptStore:
    """The connection over which this process answered last, used again while the sender is the same."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._store: TCPStore | None = None

    def at(self, host: str, port: int, timeout_s: float) -> TCPStore:
        """Raises as `connect_store`."""
        if self._store is None or self._address != (host, port) or not _answers(self._store):
            self._store = None
            self._store, self._address = connect_store(host, port, timeout_s), (host, port)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        return self._store


def _answers(store: TCPStore) -> bool:
    """Is the other side still there? Writing alone would not tell: what is written to a gone one is lost in silence."""
    try:
        store.check(["slimerl"])
    except RuntimeError:
        return False
    return True
