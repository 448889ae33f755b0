"""Turns with tools: the policy calls, sees the answers, and goes on, until a turn calls nothing.

Flows in: a policy handle. Flows out: a response of sampled and observed tokens; what was said last is judged.
A restart in the middle: whether a turn is followed by an answer stands in the tokens; a call whose answer does not is
made again.
"""

import asyncio
from dataclasses import dataclass

from slimerl.environments.calls import ToolAnswer, ToolCall
from slimerl.environments.toolbox import Toolbox
from slimerl.rewards.outcome import Failed, Outcome, Unparsable
from slimerl.rollout.agents.formats import ToolFormat
from slimerl.rollout.agents.loop import AgentFailed
from slimerl.rollout.agents.policy import STOP, TURNS, UNANSWERED, Policy
from slimerl.rollout.agents.texts import Texts
from slimerl.rollout.agents.turns import turns_of
from slimerl.rollout.prompts import Prompt
from slimerl.samples.sample import Sample


@dataclass(frozen=True)
class ToolLoop:
    toolbox: Toolbox
    format: ToolFormat
    texts: Texts
    max_turns: int

    async def __call__(self, policy: Policy, sample: Sample, prompt: Prompt) -> Outcome | None:
        """Unparsable where the last turn still called, and nothing could follow."""
        while await policy.turn() == STOP:
            turns = turns_of(sample)
            said = await self.texts.read(turns[-1].sampled)
            calls = await self.texts.do(lambda said=said: self.format.calls(said))  # type: ignore[misc]
            if not calls:
                return None
            if len(turns) >= self.max_turns:
                policy.end(TURNS)
                break
            answers = await asyncio.gather(*(self._answer(policy, call) for call in calls))
            policy.observe(await self.texts.write(self.format.frame(answers)))
        return Unparsable() if sample.finish_reason in UNANSWERED else None

    async def _answer(self, policy: Policy, call: ToolCall | ToolAnswer) -> str:
        policy.count("tool_calls")
        answer = await self.toolbox.call(call) if isinstance(call, ToolCall) else call
        if isinstance(answer, Failed):
            raise AgentFailed(f"tool_{answer.reason}", answer.detail)
        if answer.failure:
            policy.count("tool_failures")
            policy.count(f"tool_failures_{answer.failure}")
        return answer.text
