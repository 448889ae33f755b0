"""What an engine holds on this machine, and whether it is gone."""

import os
import socket
from dataclasses import dataclass, field

import psutil

from slimerl.resilience.deadline import Deadline

GONE_S = 20.0


@dataclass
class Traces:
    """Processes, the ports they listen on, their shared memory and private directories."""

    processes: list[psutil.Process] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    @classmethod
    def below(cls, pid: int) -> "Traces":
        return cls.of(psutil.Process(pid).children(recursive=True))

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> "Traces":
        traces = cls(processes)
        for process in processes:
            connections = process.net_connections("tcp")
            traces.ports |= {link.laddr.port for link in connections if link.status == psutil.CONN_LISTEN}
            maps = [region.path for region in process.memory_maps()] + [file.path for file in process.open_files()]
            traces.files |= {path for path in maps if path.startswith("/dev/shm/")}
            # The remover's command line names the private directory.
            traces.files |= {part for part in process.cmdline() if part.startswith("/tmp/slimerl-")}
        return traces

    def left(self) -> list[str]:
        """Names what is still there."""
        processes = [f"process {process.pid}" for process in self.processes if _runs(process)]
        ports = [f"port {port}" for port in self.ports if _listens(port)]
        return processes + ports + [path for path in sorted(self.files) if os.path.exists(path)]

    def wait_until_gone(self) -> None:
        gone = Deadline("the engine to leave nothing behind", GONE_S)
        gone.wait_until(lambda: not self.left(), detail=lambda: ", ".join(self.left()))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
