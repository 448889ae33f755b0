"""The daemons of a SLURM: `python slurm_daemons.py ROOT NODES`, until its standard input ends.

A controller and a few nodes, each in a network namespace with an address, a host name and ports of its own. What a node
declares (CPUs, memory, GPUs) is made up; GPUs are twins of /dev/null. Flows out: one line of JSON once all nodes are
idle (`Ready`). Invariant: when this process ends, no job, daemon, namespace or file of the cluster is left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from slimerl.resilience.deadline import Deadline
from slimerl.resilience.tied import tied_command

CPUS, MEMORY_MB, GPUS = 4, 4000, 2
"""Of a node."""


@dataclass(frozen=True)
class Ready:
    addresses: Mapping[str, str]
    """By name of the node."""
    started: float
    """When the controller was, by the machine's monotonic clock."""


def processes_with(environment: Mapping[str, str]) -> list[psutil.Process]:
    """With all of it in their own; this process and its children apart."""
    entries = {f"{name}={value}".encode() for name, value in environment.items()}
    own = {process.pid for process in psutil.Process().children()} | {os.getpid()}
    found = []
    for process in psutil.process_iter():
        try:
            inherited = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if entries <= set(inherited) and process.pid not in own:
            found.append(process)
    return found


class Daemons:
    """A context manager. `root`: an empty directory, open to all."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root = root
        self.names = [f"node{index}" for index in range(1, nodes + 1)]
        self._environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ready:
        self._net = Network(len(self.names))
        try:
            self._write_files()
            self._start("munged", ["--foreground", *self._munge_options()])
            Deadline("munged to listen", 30).wait_until((self.root / "munge.sock").exists)
            self._start("slurmctld", ["-D", "-c"])
            started = time.monotonic()
            for index, name in enumerate(self.names):
                self._start_node(index, name)
            Deadline("all nodes to be idle", 60).wait_until(self._all_idle, detail=self._logs)
        except BaseException:
            self.__exit__()
            raise
        return Ready({name: self._net.address(index) for index, name in enumerate(self.names)}, started)

    def __exit__(self, *_: object) -> None:
        for job in self._ask("squeue", "--noheader", "--format=%A"):
            self._ask("scancel", "--full", "--signal=KILL", job)
            self._ask("scancel", job)
        for daemon in reversed(self._running):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._running):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # slurmstepd and what it started outlive slurmd
        for process in processes_with({"SLURM_CONF": self._environment["SLURM_CONF"]}):
            process.kill()
        self._net.remove()
        shutil.rmtree(self.root)

    def _logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(self.root.glob("*.log")))

    def _ask(self, *command: str) -> list[str]:
        """The words that a command of SLURM prints; none where it does not answer."""
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=20, check=False
            )
        except subprocess.TimeoutExpired:
            return []
        return done.stdout.split()

    def _all_idle(self) -> bool:
        return len(set(self._ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"))) == len(self.names)

    def _start(self, name: str, options: list[str], prefix: list[str] | None = None) -> None:
        with (self.root / f"{name}.out.log").open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    tied_command([*(prefix or []), name.partition("@")[0], *options]),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _start_node(self, index: int, name: str) -> None:
        """Jobs inherit the node's host name and its view of the others' names."""
        binds = "; ".join(f"mount --bind {self.root}/{file} /etc/{file}" for file in ("hosts", "nsswitch.conf"))
        script = f'hostname {name}; {binds}; exec "$0" "$@"'
        own = ["unshare", "--uts", "--mount", "sh", "-e", "-c", script]
        enter = ["nsenter", f"--net=/run/netns/{self._net.namespace(index)}", *own]
        self._start(f"slurmd@{name}", ["-D", "-c", "-N", name], enter)

    def _munge_options(self) -> list[str]:
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = {"key-file": key.name, "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        files["log-file"] = "munged.log"
        return [f"--{option}={self.root / file}" for option, file in files.items()]

    def _write_files(self) -> None:
        addresses = [f"{self._net.address(index)} {name}\n" for index, name in enumerate(self.names)]
        (self.root / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(addresses))
        # a node has no way to a name server, and would wait for it
        switch = Path("/etc/nsswitch.conf").read_text().splitlines()
        lines = ["hosts: files" if line.startswith("hosts:") else line for line in switch]
        (self.root / "nsswitch.conf").write_text("\n".join(lines) + "\n")
        for index in range(GPUS):
            os.mknod(self.root / f"gpu{index}", 0o020666, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-{GPUS - 1}]\n")
        (self.root / "slurm.conf").write_text(self._configuration())

    def _configuration(self) -> str:
        nodes = "".join(
            f"NodeName={name} NodeAddr={self._net.address(index)} Port={self._net.port} CPUs={CPUS} Boards=1 "
            f"SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} Gres=gpu:{GPUS}\n"
            for index, name in enumerate(self.names)
        )
        return f"""ClusterName=slimerl
SlurmctldHost=localhost({self._net.controller})
SlurmctldPort={self._net.port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.root}/munge.sock,cred_expire=5
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/spool.%n
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/slurmd.%n.pid
SlurmctldLogFile={self.root}/slurmctld.log
SlurmdLogFile={self.root}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
KillWait=10
GresTypes=gpu
{nodes}PartitionName=main Default=YES Nodes=ALL State=UP
"""


class Network:
    """A bridge with an address for the controller, and a namespace behind it for each node. The number of the network
    is the first that no other one here has."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        for number in range(256):
            self._number = number
            if _ip("link", "add", self._bridge, "type", "bridge", check=False):
                break
        else:
            raise RuntimeError("256 networks of such tests are up; remove them: ip link delete slimerl…")
        try:
            _ip("address", "add", f"{self.controller}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for index in range(nodes):
                self._add(index)
        except BaseException:
            self.remove()
            raise

    @property
    def controller(self) -> str:
        return f"10.77.{self._number}.254"

    @property
    def port(self) -> int:
        """Of the controller, who shares the machine's ports with others; and of the nodes, who do not."""
        return 17_000 + self._number

    @property
    def _bridge(self) -> str:
        return f"slimerl{self._number}"

    def address(self, index: int) -> str:
        return f"10.77.{self._number}.{index + 1}"

    def namespace(self, index: int) -> str:
        return f"{self._bridge}n{index}"

    def _add(self, index: int) -> None:
        name, link = self.namespace(index), self.namespace(index)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for index in range(self._nodes):
            _ip("link", "delete", self.namespace(index), check=False)
            _ip("netns", "delete", self.namespace(index), check=False)
        _ip("link", "delete", self._bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode == 0


def main(root: Path, nodes: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with Daemons(root, nodes) as ready:
        print(json.dumps(asdict(ready)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
