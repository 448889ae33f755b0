"""From a generated sample to its outcome: decode off the event loop, then the reward.

Flows in: a sample with its response, and the row's answer. Flows out: an `Outcome`.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slimerl.rewards.outcome import Outcome, Reward, RewardRequest
from slimerl.samples.sample import Sample

Decode = Callable[[Sequence[int]], str]


class Judge:
    def __init__(self, decode: Decode, reward: Reward) -> None:
        self._decode = decode
        self._reward = reward
        # One thread: a tokenizer need not be safe for more, and decoding is short. Off the event loop all the same,
        # where a long response would hold up every other request.
        self._decoder = ThreadPoolExecutor(1, "decoder")

    async def judge(self, sample: Sample, answer: str) -> Outcome:
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._decoder, self._decode, sample.response_tokens)
        return await self._reward.score(RewardRequest(sample.sample_id, text, answer))

    def close(self) -> None:
        self._decoder.shutdown(wait=False, cancel_futures=True)
