"""Turns in an environment: actions, observations, rewards, and going on after a restart."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from talker import PROMPT, STOP, Characters, Talker, new_sample, policy_of, tokens_of

from slimerl.environments.environment import OneByOne, Step, Task
from slimerl.environments.episode_worker import Advance, Advanced, Episodes
from slimerl.rewards.outcome import Failed, Outcome, Scored
from slimerl.rollout.agents.environment_loop import EnvironmentLoop
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.agents.texts import Foreign, Texts
from slimerl.rollout.agents.turns import turns_of
from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import OBSERVED_VERSION, Sample

ASKED = Prompt("p", PROMPT, "37")


class Guess:
    """A number below 64, by higher and lower."""

    def reset(self, task: Task) -> str:
        self.secret = int(task.answer)
        self.seed = task.seed
        return "64"

    def step(self, action: str) -> Step:
        said = int(action)
        if said == self.secret:
            return Step(reward=1.0, done=True)
        return Step(">" if said < self.secret else "<", reward=-0.25)


class Here:
    """Episodes of this process. `forget`: none is remembered from one call to the next."""

    def __init__(self, make: Any = Guess, forget: bool = False) -> None:
        self._make, self._forget = make, forget
        self._episodes = Episodes(OneByOne(make))

    async def advance(self, advance: Advance) -> Advanced | Failed:
        await asyncio.sleep(0)
        if self._forget:
            self._episodes = Episodes(OneByOne(self._make))
        return self._episodes.advance([advance])[0]


def bisect(tokens: Sequence[int], seed: int) -> list[int]:
    """The rest of the next guess: the middle of what is left."""
    low, high = 0, 64
    *seen, under_way = bytes(tokens[2:]).decode().split("\n")[1:] if len(tokens) > 2 else [""]
    for line in seen:
        guess, mark = line.split(chr(STOP))
        low, high = (int(guess) + 1, high) if mark == ">" else (low, int(guess))
    return [*tokens_of(str((low + high) // 2)), STOP][len(under_way) :]


def environment_loop(episodes: Any = None, max_turns: int = 9, **options: Any) -> EnvironmentLoop:
    def line(text: str) -> list:
        return [Foreign(text), "\n"]

    return EnvironmentLoop(episodes or Here(), Texts(Characters()), line, line, max_turns, **options)


def run(policy: Policy, loop: EnvironmentLoop) -> Outcome | None:
    async def made() -> Outcome | None:
        try:
            outcome = await loop(policy, policy.sample, ASKED)
        finally:
            loop.texts.close()
        policy.close()
        return outcome

    return asyncio.run(made())


def whole(**options: Any) -> tuple[Sample, Outcome | None]:
    sample = new_sample()
    return sample, run(policy_of(sample, Talker(bisect)), environment_loop(**options))


def test_each_turn_is_an_action_and_what_it_leads_to_is_observed():
    sample, outcome = whole()
    assert bytes(sample.response_tokens).decode().replace(chr(STOP), "") == "64\n32>\n48<\n40<\n36>\n38<\n37"
    assert outcome == Scored(1.0, True)
    assert [version == OBSERVED_VERSION for version in sample.versions] == [not sampled for sampled in sample.sampled]
    assert not any(sample.sampled[:3]), "what is shown before the first action"
    assert len(turns_of(sample)) == 6


def test_the_reward_is_that_of_the_last_step_or_the_sum_of_all():
    assert whole(reward="sum")[1] == Scored(1.0 - 5 * 0.25, True)
    assert whole(max_turns=3)[1] == Scored(0.0, False)
    assert whole(max_turns=3, reward="sum")[1] == Scored(-0.75, False)


@pytest.mark.parametrize("options", [{}, {"max_turns": 4, "reward": "sum"}], ids=["to its end", "of four turns"])
@pytest.mark.parametrize("forget", [False, True], ids=["remembered", "repeated"])
def test_c1_an_episode_goes_on_after_a_restart_anywhere(options, forget):
    """Injected: the process ends after each token."""
    expected, outcome = whole(**options)
    for kept in range(len(expected.response_tokens) + 1):
        if 0 < kept < len(expected.sampled) and not expected.sampled[kept - 1] and not expected.sampled[kept]:
            continue  # what is observed is appended as a whole
        sample = new_sample()
        for place in range(kept):
            token, sampled = [expected.response_tokens[place]], expected.sampled[place]
            sample.append(token, *(([expected.behavior_logprobs[place]], 0) if sampled else ()))
        sample.finish_reason = "stop" if kept and expected.response_tokens[kept - 1] == STOP else None
        if kept == len(expected.response_tokens):
            sample.finish_reason = expected.finish_reason
        again = run(policy_of(sample, Talker(bisect, most=1)), environment_loop(Here(forget=forget), **options))
        assert (sample.tokens, sample.sampled, again) == (expected.tokens, expected.sampled, outcome)


@pytest.mark.parametrize("budget", range(4, 24))
def test_a7_an_episode_keeps_the_budget(budget):
    sample = new_sample()
    expected, _ = whole()
    outcome = run(policy_of(sample, Talker(bisect), budget), environment_loop(reward="sum"))
    assert len(sample.response_tokens) <= budget
    assert sample.response_tokens == expected.response_tokens[: len(sample.response_tokens)]
    done = sample.response_tokens == expected.response_tokens
    assert isinstance(outcome, Scored)
    assert outcome.correct == done
    assert done or sample.finish_reason in ("length", "observation_length")


def test_an_episode_that_does_not_repeat_drops_its_sample():
    """Injected: an environment with a clock, whose worker is replaced."""
    ticks = count()

    class Clock(Guess):
        def step(self, action: str) -> Step:
            step = super().step(action)
            return Step(f"{step.observation}", step.reward, step.done) if next(ticks) < 2 else Step("?")

    with pytest.raises(AgentFailed, match="another observation after 1 actions") as caught:
        run(policy_of(new_sample(), Talker(bisect)), environment_loop(Here(Clock, forget=True)))
    assert caught.value.reason == "environment_not_repeatable"


def test_a_broken_environment_drops_its_sample_under_its_name():
    class Broken:
        async def advance(self, advance: Advance) -> Failed:
            return Failed("timeout", "no answer within 1 s")

    class Nan(Guess):
        def step(self, action: str) -> Step:
            return Step(reward=float("nan"))

    for episodes, reason in ((Broken(), "environment_timeout"), (Here(Nan), "environment_not_finite")):
        with pytest.raises(AgentFailed) as caught:
            run(policy_of(new_sample(), Talker(bisect)), environment_loop(episodes))
        assert caught.value.reason == reason
    with pytest.raises(AgentFailed, match="leaves no token") as caught:
        run(policy_of(new_sample(), Talker(bisect), budget=3), environment_loop())
    assert caught.value.reason == "opening"
