"""The training loop, the same for every algorithm: take the next batch, train, sync the weights.

Flows in: a `Source` of samples, a trainer, a syncer. Flows out: a better model, and the record of the run.
Invariant: after step i the policy has version i, and what serves version i has been synced after step i.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from slimerl.resilience import heartbeat
from slimerl.spec import RunSpec
from slimerl.training.alarms import Alarms
from slimerl.training.checkpoint.write import SaveFailed
from slimerl.training.clock import Log, StepClock
from slimerl.training.memory import FreedMemory
from slimerl.training.source import Source, StepInput
from slimerl.training.step import PolicyTrainer

logger = logging.getLogger(__name__)


class Syncer(Protocol):
    def sync(self, version: int) -> dict[str, float]:
        """Bring the weights to the engines as `version`; returns the seconds of each phase."""
        ...

    def close(self) -> None:
        """At the end of the run, also of one that failed: nothing stays open towards the engines."""
        ...


class NoEngines:
    """The syncer of an algorithm that needs no engine."""

    def sync(self, version: int) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Turns(Protocol):
    """Trainer and engines take turns in the memory of the same GPUs; the syncer gives it to the engines."""

    def before_training(self, version: int) -> None:
        """The trainer takes its memory back, for the step after which the weights are `version`."""
        ...


class Checkpoints(Protocol):
    @property
    def stopping(self) -> bool:
        """The run was asked to end with the checkpoint of this step."""
        ...

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

    def require(self, step: int) -> None:
        """Raises SaveFailed: there is no complete checkpoint of `step`, whatever checkpoint.on_failure says."""
        ...


class NoCheckpoints:
    """Of a run that keeps none."""

    stopping = False

    def trained(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def take_figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...

    def require(self, step: int) -> None: ...


@dataclass(frozen=True)
class Run:
    """`export` writes the trained model, `resources` tells what the roles take, `compare_ranks` which rank the others
    wait for, from the figures of this one; all is called on every rank."""

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
    turns: Turns | None = None
    """None: trainer and engines have memory of their own."""
    compare_ranks: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda _figures: {}
    evaluated: bool = False
    """The weights that it begins with; the figures are recorded."""


def train(run: Run) -> None:
    """Run all steps of the spec that are not done yet, then export the model; asked to stop, end with a checkpoint.

    Raises:
        SaveFailed: by checkpoint.on_failure; where it happens at the last step, once the model is exported. Always
            where the run was asked to stop and the checkpoint of that step failed.
    """
    clock = StepClock(run.log)
    alarms = Alarms(run.spec.model.dtype, run.log, run.spec.algorithm.compares_groups)
    steps = run.spec.training.steps
    at_the_end, freed = _Deferred(), FreedMemory()
    _begin(run, clock)
    background = _BackgroundEvaluation(run, clock)
    for step in range(run.done_steps + 1, steps + 1):
        batch = _take(run, clock, step)
        _take_memory_back(run, clock, step)
        with clock(step, "train"):
            figures = dict(batch.figures) | run.trainer.step(batch.minibatches)
            freed.after_step()
        run.source.trained(step)
        heartbeat.enter("checkpoint")
        with at_the_end.unless(step < steps):
            run.checkpoints.trained(step)
        if run.turns is not None:
            # while the trainer has its memory; it is complete at the next step, after this one's record
            _checkpoint(run, clock, step, at_the_end)
        background.make_way(step)
        figures |= _publish(run, clock, version=step)
        figures |= clock.take()
        figures |= run.compare_ranks(figures)
        if run.spec.evaluation.is_due(step, steps) and not background.begin(step):
            figures |= _evaluate(run, clock, step)
            clock.take()
        figures |= run.resources()
        figures |= run.checkpoints.take_figures()
        figures |= alarms.check(step, figures)
        run.log.metrics(step, figures)
        if run.turns is None:
            # after the record: what a checkpoint has seen, the record has
            _checkpoint(run, clock, step, at_the_end)
        if run.checkpoints.stopping and step < steps:
            background.finish(unless=step)
            run.checkpoints.close()
            run.checkpoints.require(step)
            return
    _take_memory_back(run, clock, steps)
    with clock(steps, "export"):
        with at_the_end.unless(False):
            run.checkpoints.close()
        run.export()
    at_the_end.raise_it()


class _Deferred:
    """A checkpoint that fails when all steps are done must not cost the model."""

    def __init__(self) -> None:
        self._failure: SaveFailed | None = None

    @contextmanager
    def unless(self, at_once: bool) -> Iterator[None]:
        try:
            yield
        except SaveFailed as failure:
            if at_once:
                raise
            self._failure = failure

    def raise_it(self) -> None:
        """The last failure, if there was one."""
        if self._failure is not None:
            raise self._failure


def _begin(run: Run, clock: StepClock) -> None:
    """Bring the weights to the engines; where the run begins, evaluate and record them."""
    figures = _publish(run, clock, version=run.done_steps)
    if run.done_steps == 0:
        figures |= {} if run.spec.evaluation.engines else _evaluate(run, clock, step=0)
        run.log.metrics(0, figures)
    clock.take()


def _take(run: Run, clock: StepClock, step: int) -> StepInput:
    """The batch of `step`; engines that were started again meanwhile get the present weights."""
    while (batch := run.source.take(step, clock)) is None:
        _publish(run, clock, version=step - 1)
    return batch


def _publish(run: Run, clock: StepClock, version: int) -> dict[str, float]:
    with clock(version, "sync"):
        seconds = run.syncer.sync(version)
    return {f"sync/{phase}_s": each for phase, each in seconds.items()}


def _take_memory_back(run: Run, clock: StepClock, version: int) -> None:
    if run.turns is not None:
        with clock(version, "hand over"):
            run.turns.before_training(version)


def _checkpoint(run: Run, clock: StepClock, step: int, at_the_end: _Deferred) -> None:
    with clock(step, "checkpoint"), at_the_end.unless(step < run.spec.training.steps):
        run.checkpoints.after_step(step)


def _evaluate(run: Run, clock: StepClock, step: int) -> dict[str, float]:
    if not run.spec.evaluates:
        return {}
    while True:
        with clock(step, "evaluate"):
            figures = run.source.evaluate(step, run.trainer)
        if figures is not None:
            return figures
        _publish(run, clock, version=step)


class _BackgroundEvaluation:
    """One at a time, from the sync of its weights to the next, or, with engines of its own, as long as it takes until
    the next evaluation; its figures are a record of their own, of the step whose weights they are of.

    A run that goes on after a step whose evaluation is not recorded begins it again; one of an earlier step that was
    under way when a run broke off is lost.
    """

    def __init__(self, run: Run, clock: StepClock) -> None:
        self._run, self._clock = run, clock
        self._step: int | None = None
        self._apart = run.spec.evaluation.engines > 0
        wanted = (self._apart or run.done_steps > 0) and not run.evaluated
        if wanted and run.spec.evaluation.is_due(run.done_steps, run.spec.training.steps):
            self.begin(run.done_steps)

    def begin(self, step: int) -> bool:
        """Returns False where it is to be waited for instead: nothing goes on meanwhile."""
        if not self._run.spec.evaluation.background or step == self._run.spec.training.steps:
            return False
        self._run.source.begin_evaluation(step)
        self._step = step
        return True

    def make_way(self, version: int) -> None:
        """Before the weights of that version come."""
        if self._step is None:
            return
        wanted = not self._apart or self._run.spec.evaluation.is_due(version, self._run.spec.training.steps)
        if wanted or self._run.source.evaluation_ended(self._step):
            self.finish()

    def finish(self, unless: int | None = None) -> None:
        """Wait for it, and record it. Args: `unless`: the step of one that is begun again by the run that goes on."""
        if self._step in (None, unless):
            return
        step, self._step = self._step, None
        with self._clock(step, "evaluate"):
            figures = self._run.source.evaluate(step, self._run.trainer)
        if figures is None:
            text = "its engines ended, and those that came in their place have no weights of this step"
            self._run.log.event(step, "alarm", "evaluation given up", text)
        else:
            self._run.log.metrics(step, figures)
