"""What a server takes from its machine for as long as it runs: a port and a directory. Linux only.

Invariant: both are given back when this process ends, however it ends.
"""

import errno
import os
import random
import socket
import subprocess
import tempfile
from pathlib import Path

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 22_000)
"""Below what the kernel hands out by itself (32768 on) and what SGLang picks for its own ranks (22000 on)."""


class NoPort(RuntimeError):
    """Every port of the range is taken."""


class NoAddress(RuntimeError):
    """Other machines could not reach this one by its name."""


def own_address(network: str) -> str:
    """Where servers of this machine listen, by `cluster.network`: the loopback interface, or the address that the
    machine's name has for others.

    Raises:
        NoAddress: the name has none, or one that only this machine can reach.
    """
    if network == "loopback":
        return LOOPBACK
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise NoAddress(f"the machine's name {name} has no address ({error}); enter it in DNS or /etc/hosts") from None
    if address.startswith("127."):
        raise NoAddress(
            f"the machine's name {name} has the address {address}, which other machines cannot reach; correct "
            "/etc/hosts, or set cluster.network: loopback where all roles are on one machine"
        )
    return address


class ReservedPort:
    """A free port of this machine's `address` that no other engine role takes while its server is still starting.

    A bound socket cannot be handed to SGLang, so that the reservation is a name among the machine's abstract sockets.
    """

    def __init__(self, address: str = LOOPBACK) -> None:
        for number in random.sample(_PORTS, len(_PORTS)):
            reservation = _reserve(address, number)
            if reservation is not None:
                self.number, self._reservation = number, reservation
                return
        raise NoPort(f"no free port on {address} between {_PORTS.start} and {_PORTS.stop - 1}; end what holds them")

    def release(self) -> None:
        self._reservation.close()


def _reserve(address: str, number: int) -> socket.socket | None:
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0slimerl-port-{number}")
        with socket.socket() as probe:
            probe.bind((address, number))
    except OSError as error:
        reservation.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return reservation


class PrivateDirectory:
    """A directory for sockets and scratch files, readable by the owner alone, that a second process removes.

    It lies in the system's temporary directory: the path of a socket has at most 107 bytes, a run directory may be
    longer, or on a file system without sockets.
    """

    _REMOVE_AT_END_OF_INPUT = 'trap "" TERM INT HUP; read -r _; rm -rf -- "$0"'

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"slimerl-{name}-"))
        # The write end of the pipe is this process's alone: the kernel closes it even after SIGKILL.
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", self._REMOVE_AT_END_OF_INPUT, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=os.sep,
            start_new_session=True,
        )

    def remove(self) -> None:
        """Waits until it is gone."""
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait()
