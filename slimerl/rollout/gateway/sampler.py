"""One turn of a session, from its tokens to the engine's: through the dispatcher, part by part.

Flows in: where in a session the turn stands, what the client wants. Flows out: the turn, recorded, and meanwhile its
tokens, as engines make them where the client reads along, else part by part. Weight updates, failing engines and chunks
are the dispatcher's and the policy handle's business: a turn that they interrupt goes on from its tokens, and the
client sees none of it.
Invariants: a turn is recorded whole or not at all; whatever ends it (an answer, a failure, a client that has gone) ends
its request in the engine and its reservation; a conversation never has more tokens than a sample of the run may have.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slimerl.engine.protocol import Generation, SamplingParams
from slimerl.resilience.time_limit import TimeLimits
from slimerl.rollout.agents.policy import STOP, Generates, Policy, Watcher
from slimerl.rollout.dispatch import Completion, GenerateRequest
from slimerl.rollout.gateway.answers import Answer
from slimerl.rollout.gateway.errors import ApiError, refused
from slimerl.rollout.gateway.external import Task
from slimerl.rollout.gateway.requests import Wanted
from slimerl.rollout.gateway.sessions import Session, Sessions, Turn
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import sampling_seed
from slimerl.samples.sample import Sample
from slimerl.samples.written_ids import Tokens, WrittenIds

LONG_TOKENS = 4096
"""Decoding more takes longer than a millisecond, and is done off the event loop."""
_UNBOUND = "gateway"
"""Prompt id of what no task asked for."""

Told = Callable[[], None]
"""Called whenever the answer has grown."""


class Place(msgspec.Struct, frozen=True):
    """Where in a session a turn stands: what it goes on with, the tokens that are new, and the digest of all that."""

    session: Session
    task: Task | None
    parent: Turn | None
    observed: "array[int]"
    asked: bytes
    context: WrittenIds | None = None
    """All tokens that it is sampled from, where the client has sent them; they are those of parent and `observed`."""


class _Routed(msgspec.Struct, eq=False):
    """The dispatcher, as one turn has it."""

    dispatcher: Generates
    session: str
    seed: int | None
    answer: Answer
    told: Told
    stopped: bool = False
    """A stop text was found."""

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = lambda: None, urgent: bool = False
    ) -> Completion:
        params = request.params if self.seed is None else msgspec.structs.replace(request.params, seed=self.seed)
        return await self.send(request.request_id, request.group, request.tokens, params, urgent, started)

    async def send(
        self,
        name: str,
        group: str,
        tokens: Tokens,
        params: SamplingParams,
        urgent: bool,
        started: Callable[[], None] = lambda: None,
    ) -> Completion:
        told = self._tell if self.answer.wanted.stream else None
        request = GenerateRequest(name, group, tokens, params, self.session, told=told)
        reply = self.answer.reply
        before = len(reply.tokens)
        completion = await self.dispatcher.generate(request, started, urgent)
        rest = _behind(completion.generation, reply.tokens[before:])
        if len(reply.tokens) + len(rest.tokens) < LONG_TOKENS or self.answer.wanted.stream:
            self._tell(rest)
        else:
            self.answer.parts.append(rest)
            self.stopped = await asyncio.to_thread(reply.take, rest.tokens, rest.answer.get("text"))
        return completion

    def _tell(self, new: Generation) -> None:
        self.answer.parts.append(new)
        self.stopped = self.answer.reply.take(new.tokens, new.answer.get("text"))
        self.told()


def _behind(generation: Generation, told: list[int]) -> Generation:
    """What is new in it for one who was told its beginning."""
    count = len(told)
    if not count:
        return generation
    if generation.tokens[:count] != told:
        raise ValueError(f"of {len(generation.tokens)} tokens {count} were told, but others")
    return Generation(
        generation.tokens[count:],
        generation.logprobs[count:],
        generation.versions[count:],
        generation.finish_reason,
        generation.meta,
        generation.answer,
    )


@dataclass
class _Books(Watcher):
    """Between a turn and its task: the group's figures are the task's, its states are those of the whole session."""

    routed: _Routed
    task: Task | None
    policy: Policy | None = None

    def answered(self, prompt_tokens: int, completion: Completion) -> None:
        if self.task is not None:
            self.task.policy.watcher.answered(prompt_tokens, completion)

    def paused(self, interrupted: bool) -> None:
        """A stop text that lies across two parts is seen by nobody but us."""
        if self.routed.stopped and self.policy is not None:
            self.policy.end(STOP)


@dataclass
class TurnSampler:
    """`parts`: of what no task asks for; `max_prompt_tokens`: `data.max_prompt_tokens`; `request_s`: for one turn."""

    dispatcher: Generates
    sessions: Sessions
    parts: Parts
    max_prompt_tokens: int
    request_s: float
    _limits: TimeLimits = field(default_factory=TimeLimits)

    async def sample(self, place: Place, wanted: Wanted, answer: Answer, told: Told) -> Turn:
        """Sample a turn and record it, but for what the client is told (`Session.complete`).

        Raises:
            ApiError: it does not fit, or took longer than `request_s`.
            GenerationFailed: no engine generated it.
            SessionError: the session is full.
        """
        session, task = place.session, place.task
        run_parts = task.policy.parts if task is not None else self.parts
        budget = self._budget(place, run_parts.params, wanted)
        turn = session.begin(place.parent, place.observed, place.asked)
        try:
            routed = _Routed(self.dispatcher, session.session_id, _seed(wanted), answer, told)
            if task is not None:
                task.policy.begin()
            with self._limits.within(self.request_s):
                tokens, logprobs, versions = await _sampled(place, turn, routed, run_parts, budget)
        except BaseException as error:
            session.abandon(turn)
            self.sessions.grown(session)
            if isinstance(error, TimeoutError):
                late = f"no engine had answered after {self.request_s:g} s (deadlines.batch_s)"
                raise ApiError(504, "deadline", late) from None
            raise
        session.complete(turn, tokens, logprobs, versions, answer.finish_reason)
        self.sessions.grown(session)
        return turn

    def _budget(self, place: Place, params: SamplingParams, wanted: Wanted) -> int:
        """Tokens that the turn may have: a conversation as a whole has no more than one response of the run."""
        before = place.parent.length if place.parent is not None else 0
        context = before + len(place.observed)
        opening = place.parent.opening_length if place.parent is not None else context
        if opening > self.max_prompt_tokens:
            raise refused(
                f"the prompt has {opening} tokens, more than data.max_prompt_tokens = {self.max_prompt_tokens}",
                "messages",
                "context_length_exceeded",
            )
        left = params.max_new_tokens - (context - opening)
        if left < 1:
            raise refused(
                f"the conversation has {context - opening} tokens behind its first prompt; with the next reply they "
                f"would be more than a sample may have ({params.max_new_tokens}, rollout.max_new_tokens)",
                "messages",
                "context_length_exceeded",
            )
        return left if wanted.max_tokens is None else min(left, wanted.max_tokens)


async def _sampled(
    place: Place, turn: Turn, routed: _Routed, run_parts: Parts, budget: int
) -> tuple[list[int], list[float], list[int]]:
    """Tokens, log-probabilities and versions.

    Most turns are one part, and are recorded as it comes. One that is interrupted, or cut, goes on as a sample of the
    policy handle, which looks at every token of it.
    """
    task, answer, wanted = place.task, routed.answer, routed.answer.wanted
    whole = task.sample if task is not None else None
    name = f"{whole.sample_id if whole else place.session.session_id}/turn-{turn.number}"
    group, prompt_id = (whole.group_id, whole.prompt_id) if whole is not None else ("", _UNBOUND)
    context = place.context or tuple(turn.context())
    answer.prompt_tokens = len(context)
    seed = sampling_seed(run_parts.run_seed, name, attempt=0) if routed.seed is None else routed.seed
    params = _params(run_parts.params, wanted, budget, seed)
    parts = Parts(params, run_parts.run_seed, run_parts.chunk_tokens, run_parts.lengths)
    urgent = task is not None and task.is_evaluation
    completion = await routed.send(name, group, context, parts.first_params(), urgent)
    if task is not None:
        task.policy.watcher.answered(len(context), completion)
    generation = completion.generation
    if (ended := parts.ended(generation, prompt_id)) or routed.stopped:
        answer.finish_reason = ended or STOP
        return generation.tokens, generation.logprobs, generation.versions
    sample = Sample(name, group, prompt_id, tuple(context))
    parts.append(sample, generation)
    books = _Books(routed, task)
    policy = books.policy = Policy(sample, parts, routed, books, urgent)
    answer.finish_reason = await policy.turn()
    return sample.response_tokens, sample.behavior_logprobs, sample.versions


def _seed(wanted: Wanted) -> int | None:
    return None if wanted.seed is None else wanted.seed & 0x7FFF_FFFF


def _params(params: SamplingParams, wanted: Wanted, budget: int, seed: int) -> SamplingParams:
    extra: Mapping[str, Any] = params.extra
    if wanted.engine_params or wanted.stops:
        stop = {"stop": list(wanted.stops)} if wanted.stops else {}
        extra = {**extra, **(wanted.engine_params or {}), **stop}
    stop_token_ids = () if wanted.ignores_eos else params.stop_token_ids
    return SamplingParams(budget, params.temperature, params.top_p, seed, stop_token_ids, extra=extra)
