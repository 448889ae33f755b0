"""A real SLURM on this machine for the tests (`slurm_daemons`). Needs root and Debian's packages, which `install`
fetches."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from slurm_daemons import processes_with

from slimerl.resilience.deadline import Deadline

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "iproute2"]
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare"]
ROOT = Path(__file__).parents[2]
TICK_S = 30.0
"""How often the controller looks at time limits, counted from its start."""


class NoSlurm(Exception):
    """It cannot be here; the message says why."""


def install() -> None:
    """Install what is missing. Raises NoSlurm."""
    if os.geteuid() != 0:
        raise NoSlurm("SLURM's nodes need root: network namespaces and SLURM's own daemons")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        if shutil.which("apt-get") is None:
            raise NoSlurm(f"{', '.join(missing)} are not installed, and there is no apt-get to install them")
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *PACKAGES)
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        raise NoSlurm(f"this machine gives no namespaces: {probe.stderr.strip()}")


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=120", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        raise NoSlurm(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


class Cluster:
    """A context manager; `environment` leads SLURM's commands here. The daemons end with this process, however it
    ends: they are in a process that waits for it."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        # munge wants every directory above its socket to be open to all
        root = Path(tempfile.mkdtemp(prefix="slimerl-slurm-", dir="/tmp"))
        root.chmod(0o755)
        self._root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> "Cluster":
        daemons = [sys.executable, str(Path(__file__).with_name("slurm_daemons.py")), str(self._root), str(self._nodes)]
        self._daemons = subprocess.Popen(
            daemons, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
        assert self._daemons.stdout is not None
        line = self._daemons.stdout.readline()
        assert line, "the daemons did not start; the error is on standard error"
        ready = json.loads(line)
        self.addresses, self._started = ready["addresses"], ready["started"]
        return self

    def __exit__(self, *_: object) -> None:
        self._daemons.communicate(timeout=120)
        assert self._daemons.returncode == 0

    def run(self, *command: object, **environment: str) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_tick(self, before_s: float) -> None:
        """Wait until the controller will look at time limits in `before_s` at most."""
        Deadline("the controller's next look at time limits to be near", TICK_S + 1).wait_until(
            lambda: TICK_S - (time.monotonic() - self._started) % TICK_S <= before_s
        )

    def processes_of(self, job: str) -> list[psutil.Process]:
        """What runs for a job on any node."""
        return processes_with({"SLURM_CONF": self.environment["SLURM_CONF"], "SLURM_JOB_ID": job})

    def environment_of(self, job: str, program: str) -> dict[str, str]:
        """Of a process of a job whose command line contains `program`."""
        return next(each for each in self.processes_of(job) if program in " ".join(each.cmdline())).environ()
