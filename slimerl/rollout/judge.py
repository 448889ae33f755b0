"""From a generated sample to its outcome: decode off the event loop, then the reward.

Flows in: a sample with its response, and the row's answer. Flows out: an `Outcome`, and for the metrics how many there
were of each name.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slimerl.rewards.outcome import Events, Outcome, Reward, RewardRequest, outcome_name
from slimerl.rollout.agents.turns import last_said
from slimerl.samples.sample import Sample

Decode = Callable[[Sequence[int]], str]


class Judge:
    """`reads_prompt`, `reads_tokens`: the reward looks at the prompt, or at the token ids, too. `take_events`: what it
    has to tell besides, by name."""

    def __init__(
        self,
        decode: Decode,
        reward: Reward,
        reads_prompt: bool = False,
        take_events: Callable[[], Counter[str]] = Counter,
        reads_tokens: bool = False,
    ) -> None:
        self._decode = decode
        self._reward = reward
        self._reads_prompt = reads_prompt
        self._reads_tokens = reads_tokens
        self._take_events = take_events
        self._outcomes = Events()
        # One thread: a tokenizer need not be safe for more, and decoding is short. Off the event loop all the same,
        # where a long response would hold up every other request.
        self._decoder = ThreadPoolExecutor(1, "decoder")

    async def judge(self, sample: Sample, answer: str) -> Outcome:
        """Counts nothing: an evaluation's answers are not the batch's."""
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._decoder, self._decode, last_said(sample))
        prompt = ""
        if self._reads_prompt:
            prompt = await loop.run_in_executor(self._decoder, self._decode, sample.prompt_tokens)
        tokens = tuple(sample.tokens) if self._reads_tokens else ()
        return await self._reward.score(RewardRequest(sample.sample_id, text, answer, prompt, tokens))

    def count(self, outcome: Outcome) -> None:
        """For `take_figures`."""
        self._outcomes[outcome_name(outcome)] += 1

    def take_figures(self) -> dict[str, float]:
        """`reward/OUTCOME`: how many were counted since the last call, under every name that came up; together they are
        all. `reward/events/NAME`: what happened beside, evaluations included."""
        figures = {f"reward/{name}": float(number) for name, number in self._outcomes.take().items()}
        events = {f"reward/events/{name}": float(number) for name, number in self._take_events().items() if number}
        return figures | events

    def close(self) -> None:
        self._decoder.shutdown(wait=False, cancel_futures=True)
