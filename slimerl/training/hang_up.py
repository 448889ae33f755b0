"""Ends connections of this process that nobody closes: whoever waits at their other ends comes back. Linux only.

Flows in: what was open before. Flows out: shut connections, which their owners close whenever they go.
"""

import os
import socket
from pathlib import Path

_OWN = Path("/proc/self/fd")


def open_sockets() -> frozenset[str]:
    """By the names that the kernel gives them."""
    return frozenset(_named().values())


def hang_up(kept: frozenset[str], kept_port: int) -> int:
    """Shut all TCP connections but those of `kept`, and from or to `kept_port`; returns how many those were."""
    ended = 0
    for descriptor, name in _named().items():
        if name in kept:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as link:
                if link.family == socket.AF_UNIX or kept_port in (link.getsockname()[1], link.getpeername()[1]):
                    continue
                link.shutdown(socket.SHUT_RDWR)
                ended += 1
        except OSError:
            continue  # it listens, or is closed by now
    return ended


def _named() -> dict[int, str]:
    found = {}
    for path in _OWN.iterdir():
        try:
            name = os.readlink(path)
        except OSError:
            continue
        if name.startswith("socket:"):
            found[int(path.name)] = name
    return found
