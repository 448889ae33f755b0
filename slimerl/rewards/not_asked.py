"""The reward of a run whose environment gives it: nothing is started for one that nobody asks."""

from collections import Counter

from slimerl.rewards.outcome import Outcome, RewardRequest


class NotAsked:
    """A `RunningReward`."""

    async def score(self, request: RewardRequest) -> Outcome:
        raise RuntimeError(
            f"sample {request.sample_id}: agent.kind environment gives the reward, yet another was asked"
        )

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def take_events(self) -> Counter[str]:
        return Counter()
