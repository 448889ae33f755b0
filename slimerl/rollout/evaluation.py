"""Held-out evaluation: how many prompts the policy answers right, on the engines that serve it.

Flows in: prompts with answers, and an `EvaluateRequest`. Flows out: an `EvaluateReply`.
Invariants: one policy version answers all prompts of an evaluation, or it is refused; a prompt whose generation or
reward failed is counted as a failure and not as a wrong answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from slimerl.engine.protocol import SamplingParams
from slimerl.resilience.deadline import Deadline
from slimerl.rewards.outcome import Failed, Scored
from slimerl.rollout.agents.loop import AgentFailed, AgentLoop, SingleTurn
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.dispatch import Dispatcher, GenerationFailed
from slimerl.rollout.judge import Judge
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Prompt
from slimerl.samples.messages import EvaluateReply, EvaluateRequest
from slimerl.samples.sample import Sample
from slimerl.telemetry import trace


class EvaluationError(RuntimeError):
    """There is no result; the message says why."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """`failure`: why there is no verdict, else empty."""

    correct: bool
    tokens: int
    failure: str = ""


@dataclass(frozen=True)
class Evaluation:
    """`params` are those of every prompt but for the seed."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    run_seed: int
    dispatcher: Dispatcher
    judge: Judge
    agent: AgentLoop = field(default_factory=SingleTurn)

    async def run(self, request: EvaluateRequest) -> EvaluateReply:
        """Evaluate the version that is in service now.

        Raises:
            EvaluationError: no held-out prompts, no version yet, a new version came in between, or every prompt
                failed.
            DeadlineExceeded: not done after `request.timeout_s`.
        """
        version = self.dispatcher.router.version
        if not self.prompts:
            raise EvaluationError("there are no held-out prompts; set data.eval_path")
        if version < 0:
            raise EvaluationError("no weights have been released yet; sync them before the first evaluation")
        begun = time.monotonic()
        answers = await self._answers(request)
        trace.add("evaluate", begun, time.monotonic(), "evaluate", request.step)
        if self.dispatcher.router.version != version:
            raise EvaluationError(
                f"version {self.dispatcher.router.version} was released while version {version} was evaluated; "
                "evaluate between two weight syncs"
            )
        judged = [answer for answer in answers if not answer.failure]
        if not judged:
            reasons = Counter(answer.failure for answer in answers)
            raise EvaluationError(f"all {len(answers)} prompts failed: {dict(reasons)}")
        return EvaluateReply(
            step=request.step,
            version=version,
            accuracy=fmean(float(answer.correct) for answer in judged),
            prompts=len(judged),
            failures=len(answers) - len(judged),
            mean_response_tokens=fmean(answer.tokens for answer in judged),
            seconds=time.monotonic() - begun,
        )

    async def _answers(self, request: EvaluateRequest) -> list[_Answer]:
        tasks = [asyncio.ensure_future(self._answer(prompt)) for prompt in self.prompts]
        deadline = Deadline(f"the evaluation at step {request.step}", request.timeout_s)
        try:
            while pending := [task for task in tasks if not task.done()]:
                deadline.check(f"{len(tasks) - len(pending)} of {len(tasks)} prompts done")
                await asyncio.wait(pending, timeout=deadline.remaining_s)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: Prompt) -> _Answer:
        # No group: prompts of an evaluation are nobody's siblings.
        sample = Sample(f"evaluation/{prompt.prompt_id}", "", prompt.prompt_id, prompt.tokens)
        parts = Parts(self.params, self.run_seed)
        policy = Policy(sample, parts, self.dispatcher, urgent=True, label=f"@{self.dispatcher.router.version}")
        try:
            outcome = await self.agent(policy, sample, prompt)
        except GenerationFailed as failure:
            return _Answer(False, 0, f"generation_{failure.reason}")
        except AgentFailed as failure:
            return _Answer(False, 0, f"agent_{failure.reason}")
        policy.close()
        if outcome is None:
            outcome = await self.judge.judge(sample, prompt.answer)
        if isinstance(outcome, Failed):
            return _Answer(False, 0, f"reward_{outcome.reason}")
        correct = isinstance(outcome, Scored) and outcome.correct
        return _Answer(correct, len(sample.response_tokens))
