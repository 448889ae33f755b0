"""The training loop, the same for every algorithm: take the next batch, train, sync the weights.

Flows in: a `Source` of samples, a trainer, a syncer. Flows out: a better model, and the record of the run.
Invariant: after step i the policy has version i, and what serves version i has been synced after step i.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slimerl.spec import RunSpec
from slimerl.training.alarms import alarms
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


@dataclass(frozen=True)
class Run:
    """`export` writes the trained model. Every member is called on every rank."""

    spec: RunSpec
    trainer: PolicyTrainer
    source: Source
    syncer: Syncer
    log: Log
    export: Callable[[], None]


def train(run: Run) -> None:
    """Run all steps of the spec, then export the model."""
    clock = StepClock(run.log)
    steps = run.spec.training.steps
    figures = _publish(run, clock, version=0) | _evaluate(run, clock, step=0)
    run.log.metrics(0, figures)
    clock.take()
    for step in range(1, steps + 1):
        batch = run.source.take(step, clock)
        with clock(step, "train"):
            figures = dict(batch.figures) | run.trainer.step(batch.minibatches)
        run.source.trained(step)
        figures |= _publish(run, clock, version=step)
        figures |= clock.take()
        if _evaluation_due(run.spec, step):
            figures |= _evaluate(run, clock, step)
            clock.take()
        for alarm in alarms(figures, run.spec.model.dtype):
            logger.warning("step %d: %s", step, alarm)
        run.log.metrics(step, figures)
    with clock(steps, "export"):
        run.export()


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
