"""A job of SLURM: its nodes, and the roles of a run as steps on them.

Flows in: the spec, the environment of the job's script. Flows out: `RoleCommand`s that srun carries out.
Invariants: engine after engine fills the engines' nodes, rollout processes take turns over the trainer's; what is
appended to a command reaches the role.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slimerl.conductor.roles import RoleCommand, Roles, engine_command, rollout_command, trainer_command
from slimerl.resilience.tied import TIED_PARENT
from slimerl.spec import RunSpec

_SRUN = ("srun", "--overlap", "--cpu-bind=none", "--kill-on-bad-exit=1", "--ntasks-per-node=1")
"""Every role may use all that the job has of its node."""
_MEETING_PORT = 29_500
"""Of the trainer's nodes, unless MASTER_PORT says another."""
_ASK_S = 30.0


class NoJob(RuntimeError):
    """This process is not part of a job of SLURM, or SLURM does not say what that is."""


@dataclass(frozen=True)
class Component:
    """Nodes that were asked for together. `number`: as the commands of SLURM take it; `options`: for srun."""

    number: str
    nodes: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """Where its engines have no nodes of their own both components are the same."""

    trainer: Component
    engines: Component


def node_names(nodes: str) -> list[str]:
    """Of a list as SLURM writes it: `node[1-3]`. Raises NoJob."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoJob(f"scontrol does not say which nodes {nodes} are: {error}") from None
    return done.stdout.split()


def job_of(environment: Mapping[str, str], names: Callable[[str], Sequence[str]] = node_names) -> Job:
    """The job whose script has this environment. Raises NoJob."""
    try:
        if int(environment.get("SLURM_HET_SIZE", "1")) == 1:
            only = Component(environment["SLURM_JOB_ID"], tuple(names(environment["SLURM_JOB_NODELIST"])))
            return Job(only, only)
        trainer, engines = (
            Component(
                environment[f"SLURM_JOB_ID_HET_GROUP_{group}"],
                tuple(names(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
                (f"--het-group={group}",),
            )
            for group in (0, 1)
        )
    except KeyError as missing:
        raise NoJob(f"{missing.args[0]} is not set: --slurm is for the script of a job of SLURM") from None
    return Job(trainer, engines)


def job_faults(spec: RunSpec, job: Job, cuda: bool = False) -> Iterator[str]:
    """Why the job cannot have the roles of the spec. Args: `cuda`: its nodes have GPUs."""
    ranks, nodes, each = spec.training.parallel.world_size, spec.trainer_nodes, spec.ranks_per_node
    if nodes * each != ranks:
        yield f"training.parallel has {ranks} ranks, which do not fill {nodes} nodes of cluster.gpus_per_node = {each}"
    if len(job.trainer.nodes) < nodes:
        yield f"the trainer has {nodes} nodes by the spec, and {len(job.trainer.nodes)} in the job"
    places = _engine_places(spec, job)
    if spec.uses_engines and places < spec.engine.replicas:
        yield (
            f"engine {places} of {spec.engine.tensor_parallel} GPUs finds no node left: the job has "
            f"{len(job.engines.nodes)} for engines"
        )
    if spec.uses_engines and cuda:
        # here: it imports PyTorch, and by `elastic.py` this module
        from slimerl.conductor.preflight.model import node_faults

        yield from node_faults(spec)


@dataclass(frozen=True)
class RolesOfJob(Roles):
    """Each as a step."""

    job: Job

    @property
    def engine_places(self) -> int | None:
        return _engine_places(self.spec, self.job)

    def all(self) -> list[RoleCommand]:
        roles = []
        if self.spec.uses_engines:
            roles += [self._rollout(process) for process in range(self.spec.rollout.processes)]
            roles += [self.engine(index) for index in range(self.spec.engine.replicas)]
        return [*roles, self._trainer()]

    def engine(self, index: int) -> RoleCommand:
        first = index * self.spec.engine.tensor_parallel // self.spec.cluster.gpus_per_node
        nodes = self.job.engines.nodes[first : first + self.spec.nodes_per_engine]
        role = engine_command(self.spec, self.spec_file, index)
        role = replace(role, command=[*role.command, "--head", nodes[0]])
        return _step(role, self.job.engines, nodes, 'exec "$@" --node "$SLURM_PROCID"')

    def _rollout(self, process: int) -> RoleCommand:
        nodes = self._trainer_nodes
        return _step(rollout_command(self.spec_file, process), self.job.trainer, [nodes[process % len(nodes)]])

    def _trainer(self) -> RoleCommand:
        nodes = self._trainer_nodes
        port = os.environ.get("MASTER_PORT", str(_MEETING_PORT))
        meeting = ["--nnodes", str(len(nodes)), "--master-addr", nodes[0], "--master-port", port]
        role = trainer_command(self.spec, self.spec_file, meeting, self.spec.ranks_per_node)
        # torchrun's own name for its option --node-rank
        return _step(role, self.job.trainer, nodes, 'PET_NODE_RANK=$SLURM_PROCID exec "$@"')

    @property
    def _trainer_nodes(self) -> tuple[str, ...]:
        return self.job.trainer.nodes[: self.spec.trainer_nodes]


def _engine_places(spec: RunSpec, job: Job) -> int:
    return len(job.engines.nodes) * spec.cluster.gpus_per_node // spec.engine.tensor_parallel


def _step(role: RoleCommand, where: Component, nodes: Sequence[str], task: str = 'exec "$@"') -> RoleCommand:
    """Args: `task`: what a shell does on each node; each has a SLURM_PROCID of its own.

    srun is tied to this machine's conductor, and gives its environment to the tasks, whose parents are others.
    """
    count = len(nodes)
    options = [*where.options, f"--job-name={role.name}", f"--nodes={count}", f"--ntasks={count}"]
    shell = ["bash", "-c", f"unset {TIED_PARENT}; {task}", role.name]
    command = [*_SRUN, *options, f"--nodelist={','.join(nodes)}", *shell, *role.command]
    return replace(role, command=command, job=where.number)
