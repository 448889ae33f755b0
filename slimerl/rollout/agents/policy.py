"""The policy as an agent loop has it: the one way to sampled tokens.

Flows in: a sample with what it has so far, tokens that were observed. Flows out: the sample with the tokens that
engines sampled, each with its log-probability and version.
Invariants: a request has all tokens of the sample and begins with those of the request before (nothing is tokenised
again); sampled and observed tokens together are no more than a response may have, so that the context holds them;
draws are keyed by the sample's seed and the position of each token, whatever the turns and parts; a turn that is
interrupted, by new weights or the end of a chunk, goes on where it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from slimerl.rollout.agents.turns import turns_of
from slimerl.rollout.dispatch import Completion, GenerateRequest
from slimerl.rollout.parts import Parts
from slimerl.samples.sample import FORK, Sample

LENGTH, STOP = "length", "stop"
"""Of the model, what ended a turn."""
TURNS, OVERFLOW = "turns", "observation_length"
"""What ends a sample that would have gone on: it had all its turns; what it was to observe does not fit."""
UNANSWERED = frozenset({TURNS, OVERFLOW})


class Generates(Protocol):
    """A dispatcher, or what stands before it."""

    async def generate(
        self, request: GenerateRequest, started: Callable[[], None] = ..., urgent: bool = ...
    ) -> Completion: ...


class Watcher:
    """Who is told what becomes of a sample's requests; here nobody."""

    def started(self) -> None:
        """A request was sent, the first or after `paused`."""

    def paused(self, interrupted: bool) -> None:
        """No request is under way, and another will follow. `interrupted`: in the middle of a turn."""

    def answered(self, prompt_tokens: int, completion: Completion) -> None:
        pass

    def forked(self, fork: Sample) -> "tuple[Sample, Watcher]":
        """The sample that stands for the fork, which may have tokens already, and who is told of it."""
        return fork, Watcher()

    def counted(self, name: str) -> None:
        """Something happened that is worth a figure."""

    def ended(self, turns: int) -> None:
        """The sample is complete, after so many turns of the policy."""


class PolicyError(RuntimeError):
    """An agent loop did what it must not: a bug of the loop."""


@dataclass
class Policy:
    """Of one sample. `label` tells its requests from those of another sample with the same id."""

    sample: Sample
    parts: Parts
    dispatcher: Generates
    watcher: Watcher = field(default_factory=Watcher)
    urgent: bool = False
    label: str = ""
    _running: bool = field(default=False, init=False)
    _known: tuple[int, ...] = field(default=(), init=False)
    """To engines: what they were last sent, and what they answered."""
    _forks: "list[Policy]" = field(default_factory=list, init=False)
    _sampled: int = field(init=False)
    """Of the sample's tokens those that came through here, or were there before."""

    def __post_init__(self) -> None:
        self._sampled = sum(self.sample.sampled)

    @property
    def turn_ended(self) -> bool:
        """The last thing in the sample is a turn that has ended: it is observed what follows, or nothing does."""
        return self.parts.is_complete(self.sample)

    @property
    def left(self) -> int:
        """Tokens that the response may still have, sampled and observed."""
        return self.parts.params.max_new_tokens - len(self.sample.response_tokens)

    async def turn(self, max_tokens: int | None = None) -> str:
        """Sample until a stop token or the end of the budget; at once where the turn has ended already.

        Args:
            max_tokens: of this turn at most.

        Returns:
            What ended it, also the sample's finish reason unless something is observed: "stop", or "length".

        Raises:
            GenerationFailed: no engine generated it.
        """
        sample = self.sample
        while not self.turn_ended:
            limit = None if max_tokens is None else max_tokens - self._said_in_turn()
            if limit is not None and limit < 1:
                sample.finish_reason = LENGTH
                break
            request = self._request(limit)
            completion = await self.dispatcher.generate(request, self._started, urgent=self.urgent)
            self.watcher.answered(len(request.tokens), completion)
            self.parts.append(sample, completion.generation)
            self._known = (*request.tokens, *completion.generation.tokens)
            self._sampled += len(completion.generation.tokens)
            if not self.turn_ended:
                self._pause(interrupted=True)
        return sample.finish_reason or ""

    def observe(self, tokens: Sequence[int]) -> bool:
        """Append what the policy is to see: a tool's answer, an environment's observation.

        Returns:
            False: it does not fit with a token to spare. Nothing is appended then, and the sample is complete with
            finish reason `OVERFLOW`.

        Raises:
            PolicyError: there are no tokens, or a turn is under way.
        """
        sample = self.sample
        if not tokens:
            raise PolicyError(f"sample {sample.sample_id}: nothing was observed; turns are told apart by what is")
        if not self.turn_ended and sample.sampled and sample.sampled[-1]:
            raise PolicyError(f"sample {sample.sample_id}: something was observed in the middle of a turn")
        if len(tokens) >= self.left:
            sample.finish_reason = OVERFLOW
            return False
        self._pause(interrupted=False)
        sample.append(tokens)
        sample.finish_reason = None
        return True

    def begin(self) -> None:
        """A request of the sample is about to be sent, here or elsewhere."""
        if not self._running:
            self._started()

    def adopt(self, branch: Sample) -> None:
        """Take over what the policy sampled elsewhere (a program's session), its prompt and finish reason too."""
        for name in ("prompt_tokens", "response_tokens", "sampled", "behavior_logprobs", "versions", "finish_reason"):
            setattr(self.sample, name, getattr(branch, name))
        self._sampled = sum(branch.sampled)
        self._known = tuple(branch.tokens)

    def end(self, reason: str) -> None:
        """Complete the sample where it is."""
        self.sample.finish_reason = reason

    def count(self, name: str) -> None:
        """For the figures of the batch: `agent/NAME`."""
        self.watcher.counted(name)

    def fork(self, name: str, prompt_tokens: Sequence[int]) -> "Policy":
        """A further sample of the same group, with a prompt of its own: for a sub-agent. It is trained with this one,
        by the same reward, and must be complete when the loop returns.

        Args:
            name: among the forks of this sample; the same after a restart, where the fork has what it had.
            prompt_tokens: prompt and response together may be as long as this sample's.

        Raises:
            PolicyError: the name is taken, or the prompt leaves no token of the budget.
        """
        sample, budget = self.sample, len(self.sample.prompt_tokens) + self.parts.params.max_new_tokens
        fork_id = f"{sample.sample_id}{FORK}{name}"
        if (
            len(prompt_tokens) >= budget
            or not prompt_tokens
            or any(each.sample.sample_id == fork_id for each in self._forks)
        ):
            raise PolicyError(
                f"sample {sample.sample_id} cannot be forked as '{name}' with a prompt of {len(prompt_tokens)} tokens: "
                f"the name is taken, or there are not between 1 and {budget - 1} of them"
            )
        fork, watcher = self.watcher.forked(Sample(fork_id, sample.group_id, sample.prompt_id, tuple(prompt_tokens)))
        params = replace(self.parts.params, max_new_tokens=budget - len(prompt_tokens))
        parts = replace(self.parts, params=params)
        policy = Policy(fork, parts, self.dispatcher, watcher, self.urgent, self.label)
        self._forks.append(policy)
        return policy

    def close(self) -> None:
        """After the loop. Raises PolicyError: the sample is not what a loop must leave."""
        sample = self.sample
        if not self.turn_ended:
            raise PolicyError(f"sample {sample.sample_id}: the loop returned, but its last turn has not ended")
        if sum(sample.sampled) != self._sampled or not self._sampled:
            raise PolicyError(
                f"sample {sample.sample_id}: {sum(sample.sampled)} tokens are marked as sampled, of which the policy "
                f"sampled {self._sampled}; only policy.turn() may add such tokens, and there must be one"
            )
        self._check_unchanged(sample.tokens)
        self.begin()
        self.watcher.ended(len(turns_of(sample)))
        for fork in self._forks:
            fork.close()

    def _request(self, limit: int | None) -> GenerateRequest:
        request = self.parts.next_request(self.sample)
        self._check_unchanged(request.tokens)
        if limit is not None and limit < request.params.max_new_tokens:
            request = replace(request, params=replace(request.params, max_new_tokens=limit))
        if self.label:
            name = f"{request.request_id}{self.label}"
            request = replace(request, request_id=name, session=f"{request.session}{self.label}")
        return request

    def _check_unchanged(self, tokens: Sequence[int]) -> None:
        if tuple(tokens[: len(self._known)]) != self._known:
            raise PolicyError(f"sample {self.sample.sample_id}: tokens that an engine knows were changed")

    def _said_in_turn(self) -> int:
        count = 0
        for sampled in reversed(self.sample.sampled):
            if not sampled:
                break
            count += 1
        return count

    def _started(self) -> None:
        self._running = True
        self.watcher.started()

    def _pause(self, interrupted: bool) -> None:
        if self._running:
            self._running = False
            self.watcher.paused(interrupted)
