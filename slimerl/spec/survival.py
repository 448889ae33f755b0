"""What a run survives: checkpoints, restarts, and the bounds of its waits."""

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from slimerl.spec.fields import FilePath, NonNegative, Positive, Seconds, Strict

if TYPE_CHECKING:
    from slimerl.spec.schema import RunSpec


class CheckpointSpec(Strict):
    """Checkpoints of the run, in OUTPUT_DIR/checkpoints; a run that ended early goes on from the newest whole one."""

    every_steps: NonNegative = 10
    """0: none."""
    keep_last: Positive = 2
    resume: Literal["auto", "never"] = "auto"
    """never: refuse to start where checkpoints lie."""
    on_failure: Literal["warn", "stop"] = "warn"
    """What becomes of the run when a checkpoint cannot be written (disk full)."""
    local_dir: FilePath | None = None
    """A second tier, on the nodes: a directory of each node's own disk, or below /dev/shm, to which its trainer ranks
    write their parts, often and fast. A restart in the same layout goes on from there where that is newer; a node that
    is lost takes its parts with it."""
    local_every_steps: Positive = 1
    """How often, with local_dir; less than every_steps."""
    local_copies: Positive = 1
    """Nodes that have each part, so that a lost one does not take it along: 2 for a copy on another node. It travels
    over the trainer's network while the training waits, and needs nvidia-resiliency-ext."""

    @model_validator(mode="after")
    def _local_ones_come_between(self) -> "CheckpointSpec":
        if self.local_dir is None:
            if self.local_copies > 1:
                raise ValueError("checkpoint.local_copies means nothing without checkpoint.local_dir; set that")
            return self
        if not self.local_dir.is_absolute():
            raise ValueError(
                f"checkpoint.local_dir = {self.local_dir} must be absolute: it is a place on the disk of every node"
            )
        if self.local_every_steps >= self.every_steps:
            raise ValueError(
                f"checkpoint.local_every_steps = {self.local_every_steps} must be less than checkpoint.every_steps = "
                f"{self.every_steps}: a local checkpoint is what a run goes on from between two others"
            )
        return self


class ResilienceSpec(Strict):
    """What is started again where it failed; each time is counted and said. Errors that would come again are not."""

    run_restarts: NonNegative = 3
    """The whole run, from its newest checkpoint, where the trainer ended, or what is not started again in place."""
    engine_restarts: NonNegative = 3
    """Each engine, in the running run; it serves again after a weight sync."""
    rollout_restarts: NonNegative = 3
    """The rollout role, of several each, in the running run; it takes over from its journal. 0: the run starts over
    instead."""
    in_process_restarts: NonNegative = 0
    """Of the trainer's ranks inside their processes, where a collective failed and none of them is gone: from the
    newest checkpoint, with imports and compiled kernels as they are. With CUDA it needs nvidia-resiliency-ext. 0: the
    run starts over instead, as it does where these are used up."""


class DeadlineSpec(Strict):
    """Upper bounds of every wait; what is exceeded is named in the error."""

    start_s: Seconds = 240.0
    request_s: Seconds = 300.0
    batch_s: Seconds = 1800.0
    """For the samples of a step; engines that share the trainer's GPUs wait as long for its training."""
    sync_s: Seconds = 300.0
    checkpoint_s: Seconds = 1800.0
    """From the time when the next one is due, or the run ends."""
    alive_s: Seconds = 120.0
    """A process that is stopped, or gives no sign of life for so long, is killed, its threads' stacks in its log; then
    as after any kill. Raise it to debug a role. Of a process on another node the sign comes up to 10 s later."""
    stall_s: Seconds = 300.0
    """Between two signs of progress: micro-batches, or turns of an event loop. What has a deadline of its own (a batch,
    a sync, a checkpoint) may take that much longer."""
    terminate_s: Seconds = 25.0
    """From SIGTERM to `slimerl run` until its roles are ended, with or without the checkpoint that it asks them for."""
    shutdown_s: Seconds = 20.0

    @model_validator(mode="after")
    def _first_sync_waits_for_engines(self) -> "DeadlineSpec":
        if self.sync_s < self.start_s:
            raise ValueError(
                f"deadlines.sync_s = {self.sync_s:g} must be at least deadlines.start_s = {self.start_s:g}: the first "
                "sync waits for the engines to start"
            )
        return self


def check_checkpoints(spec: "RunSpec") -> None:
    """Raises ValueError: one would be of a step between two refreshes of the reference model, or there are no nodes for
    its copies."""
    refresh, checkpoint = spec.algorithm.reference_refresh_steps, spec.checkpoint
    ranks, group = spec.training.parallel.world_size, checkpoint.local_copies * spec.cluster.gpus_per_node
    if checkpoint.local_copies > 1 and ranks % group:
        raise ValueError(
            f"checkpoint.local_copies = {checkpoint.local_copies}: {ranks} trainer ranks do not fill groups of so many "
            f"nodes of cluster.gpus_per_node = {spec.cluster.gpus_per_node}; set it to a divisor of the trainer's nodes"
        )
    often = {"checkpoint.every_steps": checkpoint.every_steps}
    if checkpoint.local_dir is not None:
        often["checkpoint.local_every_steps"] = checkpoint.local_every_steps
    for key, every in often.items():
        if refresh and every % refresh:
            raise ValueError(
                f"{key} = {every} is no multiple of algorithm.reference_refresh_steps = {refresh}: a checkpoint keeps "
                "no second model, and a run that goes on there takes its reference from the policy"
            )
