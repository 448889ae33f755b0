"""One sample is made: the agent loop generates it, the judge gives it its reward.

Flows in: a sample that the store has, and what its prompt asks for. Flows out: the same sample, GENERATED, with its
reward, or SampleLost with the reason under which it is counted.
Invariant: nothing is said of a group here; the books of whoever asked are closed by what this returns or raises.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from slimerl.rewards.outcome import UNPARSABLE_REWARD, Failed, Outcome, Scored, Unparsable
from slimerl.rollout.agents.loop import AgentFailed, AgentLoop
from slimerl.rollout.agents.policy import Policy
from slimerl.rollout.agents.watch import BookedSample
from slimerl.rollout.dispatch import Dispatcher, GenerationFailed
from slimerl.rollout.judge import Judge
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.statistics import GroupRecord
from slimerl.samples.sample import Sample
from slimerl.samples.store import SampleStore

logger = logging.getLogger(__name__)


LARGEST_REWARD = 3.4028234663852886e38
"""What float32 holds, in which advantages are."""


class SampleLost(Exception):
    """A sample came to nothing. `reason`: for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class SampleMaker:
    """`on_reward_failure`: as `reward.on_failure`."""

    agent: AgentLoop
    parts: Parts
    dispatcher: Dispatcher
    judge: Judge
    store: SampleStore
    on_reward_failure: Literal["drop", "zero"] = "drop"
    forks: dict[str, Sample] = field(default_factory=dict)
    """Of before a restart, until their loops ask for them."""

    async def make(self, sample: Sample, record: GroupRecord, answer: str) -> None:
        """Generate and judge one sample. Raises SampleLost."""
        outcome = await self._generate(sample, record, Prompt(sample.prompt_id, sample.prompt_tokens, answer))
        begun = record.generated_s = time.monotonic()
        if outcome is None:
            outcome = await self.judge.judge(sample, answer)
        outcome = _finite(outcome)
        self.judge.count(outcome)
        record.judged_s[sample.sample_id] = time.monotonic() - begun
        self._reward(sample, outcome, record)

    async def _generate(self, sample: Sample, record: GroupRecord, prompt: Prompt) -> Outcome | None:
        """By the agent loop; what it makes of the response, where it judges by itself. Raises SampleLost."""
        policy = Policy(sample, self.parts, self.dispatcher, BookedSample(sample, self.store, record, self.forks))
        try:
            outcome = await self.agent(policy, sample, prompt)
        except GenerationFailed as failure:
            raise SampleLost(f"generation_{failure.reason}", str(failure)) from failure
        except AgentFailed as failure:
            raise SampleLost(f"agent_{failure.reason}", str(failure)) from failure
        policy.close()
        for sample_id in (*self.store.forks(sample.sample_id), sample.sample_id):
            self.store.generated(sample_id)
        return outcome

    def _reward(self, sample: Sample, outcome: Outcome, record: GroupRecord) -> None:
        match outcome:
            case Scored(reward=reward, correct=correct):
                sample.reward, sample.correct = reward, correct
            case Unparsable():
                record.unparsable.add(sample.sample_id)
                sample.reward, sample.correct = UNPARSABLE_REWARD, False
            case Failed(reason=reason, detail=detail) if self.on_reward_failure == "drop":
                raise SampleLost(f"reward_{reason}", detail)
            case Failed(reason=reason, detail=detail):
                logger.warning("reward of sample %s failed, 0 by reward.on_failure: %s", sample.sample_id, detail)
                record.reward_failed.add(sample.sample_id)
                # Nothing is known of its correctness.
                sample.reward, sample.correct = 0.0, None


def _finite(outcome: Outcome) -> Outcome:
    """The last place where a reward that is no number costs its sample alone; the trainer would end with it."""
    # the comparison is false for NaN as well
    if isinstance(outcome, Scored) and not abs(outcome.reward) <= LARGEST_REWARD:
        return Failed("not_finite", f"the reward is {outcome.reward}")
    return outcome
