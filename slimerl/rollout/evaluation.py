"""Held-out evaluation: how many prompts the policy answers right, on the engines that serve it.

Flows in: sets of prompts with answers, and an `EvaluateRequest`. Flows out: an `EvaluateReply`.
Invariants: one policy version answers all prompts of an evaluation, or it is refused; an answer whose generation or
reward failed is counted as a failure and not as a wrong answer.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from slimerl.engine.protocol import SamplingParams
from slimerl.resilience.deadline import Deadline
from slimerl.rewards.outcome import Failed, Scored
from slimerl.rollout.agents.loop import AgentFailed, AgentLoop, SingleTurn
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.dispatch import Dispatcher, GenerationFailed
from slimerl.rollout.evaluation_statistics import Estimate, Verdict, estimate, majority_at, pass_at
from slimerl.rollout.judge import Judge
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Prompt
from slimerl.samples.messages import EvaluateReply, EvaluateRequest
from slimerl.samples.sample import Sample
from slimerl.telemetry import trace

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


class EvaluationError(RuntimeError):
    """There is no result; the message says why."""


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts, and how they are sampled and what is told of them, as in `evaluation.sets`. `name`: of its figures;
    empty: `data.eval_path`."""

    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    samples: int = 1
    pass_at: Sequence[int] = (1,)
    majority_at: Sequence[int] = ()

    def sample(self, prompt: Prompt, number: int) -> Sample:
        """A sample's id is the key of its draws: those of one set are not those of another."""
        name = f"evaluation.{self.name}/{prompt.prompt_id}/{number}" if self.name else f"evaluation/{prompt.prompt_id}"
        # No group: prompts of an evaluation are nobody's siblings.
        return Sample(name, "", prompt.prompt_id, prompt.tokens)


@dataclass(frozen=True, slots=True)
class Judged:
    """`failure`: why there is no verdict, else empty."""

    verdict: Verdict
    tokens: int
    failure: str = ""


Answers = Sequence[Sequence[Judged]]
"""Of each prompt of a set."""


@dataclass(frozen=True)
class Evaluation:
    """`prompts` with `params` are `data.eval_path`; parameters are those of every prompt but for the seed."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    run_seed: int
    dispatcher: Dispatcher
    judge: Judge
    agent: AgentLoop = field(default_factory=SingleTurn)
    sets: Sequence[HeldOutSet] = ()

    async def run(self, request: EvaluateRequest) -> EvaluateReply:
        """Evaluate the version that is in service now.

        Raises:
            EvaluationError: no held-out prompts, no version yet, a new version came in between, or answers that
                failed leave nothing to tell of a set.
            DeadlineExceeded: not done after `request.timeout_s`.
        """
        sets = self.held_out_sets()
        begun = time.monotonic()
        version, answers = await self.by_one_version(lambda: self.answers(sets, request))
        trace.add("evaluate", begun, time.monotonic(), "evaluate", request.step)
        seconds = time.monotonic() - begun
        # subsets of many answers take a while to count
        return await asyncio.to_thread(_reply, request.step, version, seconds, list(zip(sets, answers, strict=True)))

    def held_out_sets(self) -> list[HeldOutSet]:
        """Those that have prompts. Raises EvaluationError: none has."""
        main = HeldOutSet("", self.prompts, self.params)
        if not (sets := [one for one in (main, *self.sets) if one.prompts]):
            raise EvaluationError("there are no held-out prompts; set data.eval_path or evaluation.sets")
        return sets

    async def by_one_version(self, ask: Callable[[], Awaitable[Found]]) -> tuple[int, Found]:
        """What is found, and the version that engines serve all the while. Raises EvaluationError: there is none, or a
        new one came in between."""
        version = self.dispatcher.router.version
        if version < 0:
            raise EvaluationError("no weights have been released yet; sync them before the first evaluation")
        found = await ask()
        if self.dispatcher.router.version != version:
            raise EvaluationError(
                f"version {self.dispatcher.router.version} was released while version {version} was evaluated; "
                "evaluate between two weight syncs"
            )
        return version, found

    async def answers(self, sets: Sequence[HeldOutSet], request: EvaluateRequest) -> list[Answers]:
        """To all prompts. Raises DeadlineExceeded."""
        wanted = [(one, prompt, number) for one in sets for prompt in one.prompts for number in range(one.samples)]
        tasks = [asyncio.ensure_future(self._answer(*each)) for each in wanted]
        deadline = Deadline(f"the evaluation at step {request.step}", request.timeout_s)
        try:
            while pending := [task for task in tasks if not task.done()]:
                deadline.check(f"{len(tasks) - len(pending)} of {len(tasks)} prompts done")
                await asyncio.wait(pending, timeout=deadline.remaining_s)
            results = iter(map(_answered, tasks))
            return [[[next(results) for _ in range(one.samples)] for _ in one.prompts] for one in sets]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, held_out: HeldOutSet, prompt: Prompt, number: int) -> Judged:
        sample = held_out.sample(prompt, number)
        parts = Parts(held_out.params, self.run_seed)
        policy = Policy(sample, parts, self.dispatcher, urgent=True, label=f"@{self.dispatcher.router.version}")
        try:
            outcome = await self.agent(policy, sample, prompt)
        except GenerationFailed as failure:
            return Judged(_NONE, 0, f"generation_{failure.reason}")
        except AgentFailed as failure:
            return Judged(_NONE, 0, f"agent_{failure.reason}")
        policy.close()
        if outcome is None:
            outcome = await self.judge.judge(sample, prompt.answer)
        if isinstance(outcome, Failed):
            return Judged(_NONE, 0, f"reward_{outcome.reason}")
        tokens = len(sample.response_tokens)
        if not isinstance(outcome, Scored):
            return Judged(_NONE, tokens)
        if held_out.majority_at and not outcome.correct and not outcome.said:
            return Judged(_NONE, tokens, "answer_not_told")
        return Judged(Verdict(outcome.correct, outcome.said), tokens)


_NONE = Verdict(False)
"""Of a response that holds no answer."""


def _answered(task: "asyncio.Task[Judged]") -> Judged:
    """What came of a task that has ended, whatever ended it: a bug in one answer costs that answer."""
    if task.cancelled():
        return Judged(_NONE, 0, "cancelled")
    if (error := task.exception()) is None:
        return task.result()
    logger.error("an answer of the evaluation: an unexpected error", exc_info=error)
    return Judged(_NONE, 0, "internal_error")


def _reply(step: int, version: int, seconds: float, sets: Sequence[tuple[HeldOutSet, Answers]]) -> EvaluateReply:
    """Raises EvaluationError."""
    figures: dict[str, float] = {}
    accuracy, prompts, failures, tokens = 0.0, 0, 0, 0.0
    for held_out, answers in sets:
        told = _told(held_out, answers)
        if held_out.name:
            figures |= {f"eval/{held_out.name}/{name}": value for name, value in told.items()}
        else:
            accuracy, prompts, failures = told["pass_at_1"], int(told["prompts"]), int(told["failures"])
            tokens = told["mean_response_tokens"]
            figures |= {f"eval/accuracy_{end}": told[f"pass_at_1_{end}"] for end in ("low", "high")}
    return EvaluateReply(step, version, accuracy, prompts, failures, tokens, seconds, figures)


def _told(held_out: HeldOutSet, answers: Answers) -> dict[str, float]:
    """The figures of a set. Raises EvaluationError."""
    judged = [[answer for answer in of_prompt if not answer.failure] for of_prompt in answers]
    kept = [of_prompt for of_prompt in judged if of_prompt]
    failed = Counter(answer.failure for of_prompt in answers for answer in of_prompt if answer.failure)
    name = f"set '{held_out.name}': " if held_out.name else ""
    if not kept:
        raise EvaluationError(f"{name}all {len(answers)} prompts failed: {dict(failed)}")
    figures = {
        "prompts": float(len(kept)),
        "failures": float(failed.total()),
        "mean_response_tokens": fmean(answer.tokens for of_prompt in kept for answer in of_prompt),
    }
    for kind, of_verdicts, counts in (
        ("pass", pass_at, held_out.pass_at),
        ("majority", majority_at, held_out.majority_at),
    ):
        for k in counts:
            enough = [[answer.verdict for answer in of_prompt] for of_prompt in kept if len(of_prompt) >= k]
            if not enough:
                raise EvaluationError(f"{name}no prompt has {k} judged answers for {kind}@{k}: {dict(failed)}")
            found = estimate([of_verdicts(verdicts, k) for verdicts in enough], held_out.samples // k)
            figures |= _named(f"{kind}_at_{k}", found)
    return figures


def _named(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
