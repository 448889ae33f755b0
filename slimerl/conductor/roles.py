"""The command line and environment of every role of a run: pure values.

Flows in: the spec and where its effective copy lies. Flows out: `RoleCommand`s in start order.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimerl.resilience.name_lookups import bounded_lookups
from slimerl.spec import RunSpec

ROLLOUT = "rollout"


@dataclass(frozen=True)
class RoleCommand:
    """`leads`: the run is over when it ends with 0; any other role that ends before has failed. `engine_id`: of an
    engine, which can be started again by itself. `job`: of SLURM, that the command starts a step of; empty: it starts
    a process here."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    leads: bool = False
    engine_id: str | None = None
    job: str = ""

    def has_heartbeat(self, name: str) -> bool:
        """Is that one of this role's? Ranks have numbers behind its name, nodes behind the first one too."""
        own, _, rank = name.partition("-") if self.leads else (name.partition("@")[0], "", "")
        return own == self.name and (not rank or rank.isdecimal())


@dataclass(frozen=True)
class Roles:
    """Of a run on this machine."""

    spec: RunSpec
    spec_file: Path

    @property
    def engine_places(self) -> int | None:
        """How many engines there can be at once; None: as many as memory and GPUs allow."""
        return None

    def all(self) -> list[RoleCommand]:
        """As `role_commands`."""
        return role_commands(self.spec, self.spec_file)

    def engine(self, index: int) -> RoleCommand:
        """As `engine_command`."""
        return engine_command(self.spec, self.spec_file, index)


def role_commands(spec: RunSpec, spec_file: Path) -> list[RoleCommand]:
    """Every role of the run; engines and rollout only where the algorithm samples."""
    roles = []
    if spec.uses_engines:
        roles += [rollout_command(spec_file, process) for process in range(spec.rollout.processes)]
        roles += [engine_command(spec, spec_file, index) for index in range(spec.engine.replicas)]
    world_size = spec.training.parallel.world_size
    return [*roles, trainer_command(spec, spec_file, ["--standalone"], world_size)]


def rollout_name(process: int) -> str:
    """Of the role of a rollout process; the first has the name of an only one."""
    return f"{ROLLOUT}-{process}" if process else ROLLOUT


def rollout_command(spec_file: Path, process: int) -> RoleCommand:
    """Of one rollout process."""
    number = ["--process", str(process)] if process else []
    command = [sys.executable, "-m", "slimerl.rollout", str(spec_file), *number]
    return RoleCommand(rollout_name(process), command, _threads(1))


def engine_command(spec: RunSpec, spec_file: Path, index: int) -> RoleCommand:
    """Of one engine, also of one more than the spec names."""
    name = f"engine-{index}"
    command = [sys.executable, "-m", "slimerl.engine", str(spec_file), "--index", str(index)]
    if index >= spec.engine.replicas:
        command.append(f"engine.replicas={index + 1}")
    return RoleCommand(name, command, _threads(spec.engine.threads), engine_id=name)


def trainer_command(spec: RunSpec, spec_file: Path, meeting: Sequence[str], ranks: int) -> RoleCommand:
    """Args: `meeting`: torchrun's options that say where its nodes meet; `ranks`: of each node."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--max-restarts", "0"]
    command = [*launcher, "--nproc-per-node", str(ranks), "-m", "slimerl.training"]
    return RoleCommand("trainer", [*command, str(spec_file)], _threads(spec.training.threads_per_rank), leads=True)


def _threads(count: int) -> dict[str, str]:
    """Without CUDA every role computes on the same cores: unbounded OpenMP pools would fight for them, and threads
    that spin while they wait would take them from the role that works."""
    return {
        **os.environ,
        **bounded_lookups(),
        "OMP_NUM_THREADS": str(count),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
