"""Turns in an environment: each turn of the policy is an action, and what the environment shows is observed.

Flows in: a policy handle. Flows out: a response of sampled and observed tokens, and the environment's reward.
A restart in the middle: the actions stand in the tokens, and the environment repeats them; where it then shows what
the policy has not seen, the sample is dropped, since its reward would be that of another episode.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slimerl.environments.environment import Task
from slimerl.environments.episode_worker import Advance, Advanced
from slimerl.environments.episodes import EpisodePool
from slimerl.rewards.outcome import Failed, Outcome, Scored
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import STOP, TURNS, UNANSWERED, Policy
from slimerl.rollout.agents.texts import Piece, Texts
from slimerl.rollout.agents.turns import seen_first, turns_of
from slimerl.rollout.prompts import Prompt, sampling_seed
from slimerl.samples.sample import Sample

Frame = Callable[[str], list[Piece]]
"""An observation → pieces of text to observe."""


@dataclass(frozen=True)
class EnvironmentLoop:
    """`opening`: frame of what is observed before the first action; None: nothing can be."""

    episodes: EpisodePool
    texts: Texts
    frame: Frame
    opening: Frame | None
    max_turns: int
    reward: Literal["final", "sum"] = "final"

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        seed = sampling_seed(0, prompt.prompt_id, attempt=0)
        task = Task(await self.texts.read(prompt.tokens), prompt.answer, seed)
        actions = [await self.texts.read(turn.sampled) for turn in turns_of(sample) if turn.observed]
        reached = await self._advance(policy, sample, task, actions)
        await self._open(policy, sample, reached)
        while (reason := await policy.turn()) == STOP or reason in UNANSWERED:
            actions.append(await self.texts.read(turns_of(sample)[-1].sampled))
            reached = await self._advance(policy, sample, task, actions)
            if reached.done or reason != STOP:
                break
            if len(actions) >= self.max_turns:
                policy.end(TURNS)
                break
            tokens = await self.texts.write(self.frame(reached.observations[-1]))
            if not policy.observe(tokens):
                break
        return self._outcome(reached)

    async def _open(self, policy: Policy, sample: Sample, reached: Advanced) -> None:
        if sample.response_tokens or not reached.observations[0]:
            return
        if self.opening is None:
            raise AgentFailed(
                "opening",
                "the environment shows something before the first action, where a chat template has begun the answer "
                "already; let it stand in the prompt",
            )
        if not policy.observe(await self.texts.write(self.opening(reached.observations[0]))):
            raise AgentFailed("opening", "what the environment shows first leaves no token of rollout.max_new_tokens")

    async def _advance(self, policy: Policy, sample: Sample, task: Task, actions: list[str]) -> Advanced:
        episode_id = f"{sample.sample_id}{policy.label}"
        reached = await self.episodes.advance(Advance(episode_id, task, tuple(actions)))
        if isinstance(reached, Failed):
            raise AgentFailed(f"environment_{reached.reason}", reached.detail)
        policy.count("environment_steps")
        if not all(map(math.isfinite, reached.rewards)):
            raise AgentFailed("environment_not_finite", f"rewards are {reached.rewards}")
        await self._check_repeated(sample, reached)
        return reached

    async def _check_repeated(self, sample: Sample, reached: Advanced) -> None:
        """What was repeated must be what the policy has seen."""
        turns = turns_of(sample)
        for number, text in enumerate(reached.observations, start=reached.first):
            seen = seen_first(sample) if number == 0 else turns[number - 1].observed
            frame = self.opening if number == 0 else self.frame
            if seen and frame is not None and tuple(await self.texts.write(frame(text))) != tuple(seen):
                raise AgentFailed("environment_not_repeatable", f"another observation after {number} actions")

    def _outcome(self, reached: Advanced) -> Outcome:
        last = reached.rewards[-1] if reached.done else 0.0
        correct = reached.correct if reached.correct is not None else last > 0
        return Scored(last if self.reward == "final" else sum(reached.rewards), reached.done and correct)
