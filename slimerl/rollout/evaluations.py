"""Evaluations that were begun: who waits for the result, and those that come to none because their weights are gone.

Flows in: requests of the trainer, what engines serve. Flows out: replies, or `SyncWanted` where engines need the
weights first, or where nobody can bring them any more.
Invariants: an evaluation that is asked for again is the same; with engines of its own it is of the version of the step
that was asked for, or it is not made.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.evaluation import Evaluation, EvaluationError
from slimerl.rollout.evaluation_engines import EvaluationEngines
from slimerl.samples.messages import EvaluateReply, EvaluateRequest, SyncWanted


@dataclass
class Evaluations:
    """
    Args of the constructor:
        evaluation: the newest, by which those that begin are made.
        progress: set when an engine has changed its state.
        version: of the weights that were released last.
        serve, unsynced: do the engines of the rollouts serve, and those of them that want weights first.
        evaluators: engines that do nothing else; None: those of the rollouts evaluate.
    """

    evaluation: Callable[[], Evaluation]
    progress: asyncio.Event
    version: Callable[[], int]
    serve: Callable[[], bool]
    unsynced: Callable[[], list[str]]
    evaluators: EvaluationEngines | None = None
    _begun: "dict[int, asyncio.Task[EvaluateReply]]" = field(default_factory=dict)
    """By step, and no result given yet."""
    _asking: Counter[int] = field(default_factory=Counter)
    """How many wait for the result of a step: one, and another where a connection broke and the call was made again."""
    _wanted: set[int] = field(default_factory=set)
    """As `_begun`, and those whose engines do not serve their weights."""
    _running: "set[asyncio.Task[EvaluateReply]]" = field(default_factory=set)

    def begin(self, request: EvaluateRequest) -> None:
        """`result` of the same step has the reply."""
        self._wanted.add(request.step)
        if request.step not in self._begun and self._possible(request.step):
            self._begun[request.step] = self._started(request)

    async def result(self, request: EvaluateRequest) -> EvaluateReply | SyncWanted:
        """The evaluation, which may have been begun, or what its engines need first: no engine is named where the
        weights of the step are gone.

        Raises:
            EvaluationError, DeadlineExceeded: see `Evaluation.run`; no engine of its own can serve the weights.
        """
        step = request.step
        deadline = Deadline(f"engines for the evaluation at step {step}", request.timeout_s)
        self.begin(request)
        self._wanted.discard(step)
        self._asking[step] += 1
        try:
            while (evaluating := self._begun.get(step)) is None or not evaluating.done():
                self.progress.clear()
                if (instead := self._instead(step)) is not None:
                    return instead
                if evaluating is None and self._possible(step):
                    evaluating = self._begun[step] = self._started(request)
                if evaluating is None and self.evaluators is not None:
                    deadline.check(self.evaluators.reasons())
                await self._changed(evaluating, deadline)
            return await evaluating
        finally:
            self._asking[step] -= 1
            if not self._asking[step]:
                await self._end(step)

    def running(self) -> bool:
        return bool(self._running)

    def pending(self) -> list[int]:
        """Steps of those that were begun, have no result yet, and may have one."""
        ended = {step for step, task in self._begun.items() if task.done()}
        return sorted(step for step in self._wanted - ended if not self._gone(step))

    def cancel(self) -> None:
        """Those that nobody has asked for."""
        for step, evaluating in self._begun.items():
            if not self._asking[step]:
                evaluating.cancel()

    async def _end(self, step: int) -> None:
        """Nobody waits for it any more."""
        del self._asking[step]
        evaluating = self._begun.pop(step, None)
        if evaluating is not None:
            evaluating.cancel()
            await asyncio.gather(evaluating, return_exceptions=True)

    def _started(self, request: EvaluateRequest) -> "asyncio.Task[EvaluateReply]":
        task = asyncio.create_task(self.evaluation().run(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _possible(self, step: int) -> bool:
        """Engines that share their time say by themselves what is amiss."""
        return self.evaluators is None or self.evaluators.serve(step)

    def _gone(self, step: int) -> bool:
        """Does no engine serve the weights of the step, and has the trainer others?"""
        return self.evaluators is not None and not self.evaluators.serve(step) and self.version() != step

    def _instead(self, step: int) -> SyncWanted | None:
        """Of a result that will not come. Raises EvaluationError."""
        if self.evaluators is None:
            engines = [] if self.serve() else self.unsynced()
            return SyncWanted(engines) if engines else None
        if self.evaluators.serve(step):
            return None
        engines = self.evaluators.unsynced()
        if engines or self._gone(step):
            return SyncWanted(engines)
        if self.evaluators.all_dirty():
            raise EvaluationError(f"no engine of evaluation.engines serves version {step}: {self.evaluators.reasons()}")
        return None

    async def _changed(self, evaluating: "asyncio.Task[EvaluateReply] | None", deadline: Deadline) -> None:
        """Until there is something to look at."""
        progress = asyncio.ensure_future(self.progress.wait())
        try:
            waiting = [progress] if evaluating is None else [evaluating, progress]
            within_s = deadline.remaining_s if evaluating is None else None
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            progress.cancel()
