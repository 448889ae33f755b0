"""The training loop, the same for every algorithm: take the next batch, train, sync the weights.

Flows in: a `Source` of samples, a trainer, a syncer. Flows out: a better model, and the record of the run.
Invariant: after step i the policy has version i, and what serves version i has been synced after step i.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from slimerl.spec import RunSpec
from slimerl.training.alarms import Alarms
from slimerl.training.clock import Log, StepClock
from slimerl.training.source import Source
from slimerl.training.step import PolicyTrainer

logger = logging.getLogger(__name__)


class Syncer(Protocol):
    def sync(self, version: int) -> dict[str, float]:
        """Bring the weights to the engines as `version`; returns the seconds of each phase."""
        ...


class NoEngines:
    """The syncer of an algorithm that needs no engine."""

    def sync(self, version: int) -> dict[str, float]:
        return {}


class Checkpoints(Protocol):
    def trained(self, step: int) -> None:
        """The weights are those of `step`; nothing of the next one has begun."""
        ...

    def after_step(self, step: int) -> None:
        """Start what is due, complete what is written."""
        ...

    def take_figures(self) -> dict[str, float]:
        """What became of checkpoints since the last call."""
        ...

    def close(self) -> None:
        """Wait for what is being written."""
        ...


class NoCheckpoints:
    """Of a run that keeps none."""

    def trained(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def take_figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Run:
    """`export` writes the trained model, `resources` tells what the roles take; all is called on every rank."""

    spec: RunSpec
    trainer: PolicyTrainer
    source: Source
    syncer: Syncer
    log: Log
    export: Callable[[], None]
    resources: Callable[[], Mapping[str, float]] = dict
    checkpoints: Checkpoints = field(default_factory=NoCheckpoints)
    done_steps: int = 0
    """That the weights have seen already; their record is there."""


def train(run: Run) -> None:
    """Run all steps of the spec that are not done yet, then export the model."""
    clock, alarms = StepClock(run.log), Alarms(run.spec.model.dtype, run.log)
    steps = run.spec.training.steps
    _begin(run, clock)
    for step in range(run.done_steps + 1, steps + 1):
        batch = run.source.take(step, clock)
        with clock(step, "train"):
            figures = dict(batch.figures) | run.trainer.step(batch.minibatches)
        run.source.trained(step)
        run.checkpoints.trained(step)
        figures |= _publish(run, clock, version=step)
        figures |= clock.take()
        if _evaluation_due(run.spec, step):
            figures |= _evaluate(run, clock, step)
            clock.take()
        figures |= run.resources()
        figures |= run.checkpoints.take_figures()
        figures |= alarms.check(step, figures)
        run.log.metrics(step, figures)
        # after the record: what a checkpoint has seen, the record has
        with clock(step, "checkpoint"):
            run.checkpoints.after_step(step)
    with clock(steps, "export"):
        run.checkpoints.close()
        run.export()


def _begin(run: Run, clock: StepClock) -> None:
    """Bring the weights to the engines; where the run begins, evaluate and record them."""
    figures = _publish(run, clock, version=run.done_steps)
    if run.done_steps == 0:
        figures |= _evaluate(run, clock, step=0)
        run.log.metrics(0, figures)
    clock.take()


def _publish(run: Run, clock: StepClock, version: int) -> dict[str, float]:
    with clock(version, "sync"):
        seconds = run.syncer.sync(version)
    return {f"sync/{phase}_s": each for phase, each in seconds.items()}


def _evaluate(run: Run, clock: StepClock, step: int) -> dict[str, float]:
    if run.spec.data.eval_path is None:
        return {}
    with clock(step, "evaluate"):
        return run.source.evaluate(step, run.trainer)


def _evaluation_due(spec: RunSpec, step: int) -> bool:
    every = spec.evaluation.every_steps
    return step == spec.training.steps or (every > 0 and step % every == 0)
