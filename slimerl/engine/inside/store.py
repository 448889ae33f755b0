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
