"""The interface of agent loops, and the plainest of them.

Flows in: a policy handle, the sample that it continues, the prompt. Flows out: the sample's response, and, from a loop
that judges by itself, an `Outcome`.
Invariant: a loop keeps nothing of a sample elsewhere. It may be called with a sample that was interrupted anywhere, by
a restart too: what it needs to know it takes from the sample's tokens (`turns_of`), or does again from the beginning.
"""

from typing import Protocol

from slimerl.rewards.outcome import Outcome
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import Sample


class AgentFailed(Exception):
    """The machinery around a policy failed, which says nothing about the policy: the sample is dropped as
    `agent_REASON`. `reason`: one word, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class AgentLoop(Protocol):
    """An async function; one for all samples of a run, called for many of them at a time."""

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        """Continue `sample` by `policy.turn()` and `policy.observe(tokens)` until it is complete.

        Returns:
            What came of it, where the loop can tell; None: the run's reward judges it.

        Raises:
            AgentFailed: the sample is dropped.
            GenerationFailed: as `policy.turn` raises it; to be let through.
        """
        ...


class SingleTurn:
    """One answer to the prompt."""

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        await policy.turn()
        return None
