"""The command line and environment of every role of a run: pure values.

Flows in: the spec and where its effective copy lies. Flows out: `RoleCommand`s in start order.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from slimerl.resilience.name_lookups import bounded_lookups
from slimerl.spec import RunSpec

ROLLOUT = "rollout"


@dataclass(frozen=True)
class RoleCommand:
    """`leads`: the run is over when it ends with 0; any other role that ends before has failed. `engine_id`: of an
    engine, which can be started again by itself."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    leads: bool = False
    engine_id: str | None = None


def role_commands(spec: RunSpec, spec_file: Path) -> list[RoleCommand]:
    """Every role of the run; engines and rollout only where the algorithm samples."""
    roles = []
    if spec.uses_engines:
        roles += [_rollout(spec_file, process) for process in range(spec.rollout.processes)]
        roles += [engine_command(spec, spec_file, index) for index in range(spec.engine.replicas)]
    return [*roles, _trainer(spec, spec_file)]


def rollout_name(process: int) -> str:
    """Of the role of a rollout process; the first has the name of an only one."""
    return f"{ROLLOUT}-{process}" if process else ROLLOUT


def _rollout(spec_file: Path, process: int) -> RoleCommand:
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


def _trainer(spec: RunSpec, spec_file: Path) -> RoleCommand:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    command = [*launcher, "--nproc-per-node", str(spec.training.parallel.world_size), "-m", "slimerl.training"]
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
