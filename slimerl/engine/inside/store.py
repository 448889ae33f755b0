"""Connecting to the sender's store, without waiting for a sender that is gone.

Flows in: where it listens. Flows out: a client of torch's TCPStore.
"""

import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore

_CONNECT_S = 5.0
_KEPT_S = 30.0
"""In a sync messages follow each other; a connection that was idle longer may have been cut on the way, unnoticed."""


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of its own: waits on one connection block each other.

    Raises:
        OSError: nobody listens there; at once, where torch would try again until the timeout.
        RuntimeError: whoever listens there is no store, or does not answer in time.
    """
    socket.create_connection((host, port), min(_CONNECT_S, timeout_s)).close()
    return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class KeptStore:
    """The connection over which this process answered last, used again while the sender is the same.

    It is not asked whether it still stands: torch's store would wait without end for a sender that stands still. What
    is written to one that is gone is lost, and nobody waits for it.
    """

    def __init__(self, longest_s: float = _KEPT_S) -> None:
        """`longest_s`: one that nothing was asked of for so long is not used again."""
        self._longest_s = longest_s
        self._used = 0.0
        self._sender: tuple[str, int, str] | None = None
        self._store: TCPStore | None = None

    def at(self, host: str, port: int, secret: str, timeout_s: float) -> TCPStore:
        """A client of the sender that has this secret. Raises as `connect_store`."""
        sender = (host, port, secret)
        is_recent = time.monotonic() - self._used < self._longest_s
        if self._store is None or self._sender != sender or not is_recent:
            self._store = None
            self._store, self._sender = connect_store(host, port, timeout_s), sender
        self._used = time.monotonic()
        return self._store
