"""What a run survives: checkpoints, restarts, and the bounds of its waits."""

from typing import Literal

from pydantic import model_validator

from slimerl.spec.fields import NonNegative, Positive, Seconds, Strict


class CheckpointSpec(Strict):
    """Checkpoints of the run, in OUTPUT_DIR/checkpoints; a run that ended early goes on from the newest whole one."""

    every_steps: NonNegative = 10
    """0: none."""
    keep_last: Positive = 2
    resume: Literal["auto", "never"] = "auto"
    """never: refuse to start where checkpoints lie."""
    on_failure: Literal["warn", "stop"] = "warn"
    """What becomes of the run when a checkpoint cannot be written (disk full)."""


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
