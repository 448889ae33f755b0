"""Held-out evaluation on the engines of several rollout processes.

Flows in: as of `Evaluation`. Flows out: in the first process the figures of all prompts, in every other the answers to
its part of them.
Invariant: prompts and draws are those of an only process, whoever answers, and so are the figures; all parts are by one
version. A process that ends meanwhile is asked again once another is in its place.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.evaluation import Answers, Evaluation, EvaluationError, HeldOutSet, Judged
from slimerl.rollout.evaluation_statistics import Verdict
from slimerl.rollout.process_calls import ProcessCalls, ProcessRefused, ProcessUnreachable
from slimerl.samples.ledger_messages import EvaluatedAnswer, EvaluatedPart, EvaluatePart
from slimerl.samples.messages import EvaluateRequest, decode
from slimerl.samples.messages import Path as Endpoint

RETRY_S = 0.5
ANSWER_S = 10.0
"""For the answer of a process, beside what it may take."""


@dataclass(frozen=True, kw_only=True)
class SharedEvaluation(Evaluation):
    """Of the first process. `calls`: to the others."""

    calls: ProcessCalls
    processes: int

    async def answers(self, sets: Sequence[HeldOutSet], request: EvaluateRequest) -> list[Answers]:
        """To all prompts. Raises DeadlineExceeded, EvaluationError: another process cannot tell its part."""
        own = super().answers(_parts_of(sets, 0, self.processes), request)
        deadline = Deadline(f"the evaluation at step {request.step}", request.timeout_s)
        others = [self._of(process, request.step, deadline) for process in range(1, self.processes)]
        asked = [asyncio.ensure_future(each) for each in (own, *others)]
        try:
            parts = await asyncio.gather(*asked)
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return [_woven([part[number] for part in parts]) for number in range(len(sets))]

    async def _of(self, process: int, step: int, deadline: Deadline) -> list[Answers]:
        version, read = self.dispatcher.router.version, partial(decode, kind=EvaluatedPart)
        while True:
            wanted = EvaluatePart(step, deadline.remaining_s, process, self.processes)
            try:
                within_s = deadline.remaining_s + ANSWER_S
                found = await self.calls.ask(process, Endpoint.EVALUATE_PART, wanted, read, within_s)
            except ProcessRefused as error:
                raise EvaluationError(f"rollout process {process}: {error}") from error
            except ProcessUnreachable as error:
                deadline.check(f"rollout process {process}: {error}")
                await asyncio.sleep(min(RETRY_S, deadline.remaining_s))
                continue
            if found.version != version:
                raise EvaluationError(
                    f"rollout process {process} evaluated version {found.version}, the first one version {version}; "
                    "evaluate between two weight syncs"
                )
            return [[[_judged(one) for one in of_prompt] for of_prompt in of_set] for of_set in found.answers]


def over_all(evaluation: Evaluation, calls: ProcessCalls, processes: int) -> SharedEvaluation:
    """The same, on the engines of all processes."""
    same = {each.name: getattr(evaluation, each.name) for each in fields(evaluation)}
    return SharedEvaluation(**same, calls=calls, processes=processes)


async def evaluated_part(evaluation: Evaluation, wanted: EvaluatePart) -> EvaluatedPart:
    """Raises as `Evaluation.run`."""
    sets = _parts_of(evaluation.held_out_sets(), wanted.part, wanted.parts)
    request = EvaluateRequest(wanted.step, wanted.timeout_s)
    version, answers = await evaluation.by_one_version(lambda: evaluation.answers(sets, request))
    told = [[[_told(one) for one in of_prompt] for of_prompt in of_set] for of_set in answers]
    return EvaluatedPart(version, told)


def _parts_of(sets: Sequence[HeldOutSet], part: int, parts: int) -> list[HeldOutSet]:
    return [replace(one, prompts=one.prompts[part::parts]) for one in sets]


def _woven(parts: Sequence[Answers]) -> Answers:
    """In the order of the set's prompts."""
    count = sum(map(len, parts))
    return [parts[place % len(parts)][place // len(parts)] for place in range(count)]


def _told(judged: Judged) -> EvaluatedAnswer:
    said = judged.verdict.said
    return EvaluatedAnswer(judged.verdict.correct, None if said is None else str(said), judged.tokens, judged.failure)


def _judged(told: EvaluatedAnswer) -> Judged:
    return Judged(Verdict(told.correct, told.said), told.tokens, told.failure)
