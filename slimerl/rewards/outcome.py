"""What scoring a response can come to, and the interface of everything that scores.

Three outcomes that are never confused: a response was judged (right or wrong), it holds nothing that could be judged,
or the judging itself failed. The last one says nothing about the response.
"""

from collections import Counter
from typing import Protocol

import msgspec

UNPARSABLE_REWARD = 0.0


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Judged. `correct` is accuracy; `reward` may be shaped. `verdict`: in one word, for counting, why it is wrong,
    where the reward can tell. `said`: what the response gives as its answer, where the reward can tell; answers that
    are written alike are one when votes are counted."""

    reward: float
    correct: bool
    verdict: str = ""
    said: str = ""


class Unparsable(msgspec.Struct, frozen=True, tag="unparsable"):
    """The response holds no answer. It earns `UNPARSABLE_REWARD`, is not correct, and is counted apart."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The judging failed. `reason`: one word, for counting; `detail`: for the log."""

    reason: str
    detail: str = ""


Outcome = Scored | Unparsable | Failed


class RewardRequest(msgspec.Struct, frozen=True):
    """What is to be judged. `response`: decoded text without special tokens; `answer`: the row's; `prompt`: as the
    model got it, template included, and `tokens`: prompt and response as sampled, for rewards that ask for them."""

    sample_id: str
    response: str
    answer: str
    prompt: str = ""
    tokens: tuple[int, ...] = ()


class Reward(Protocol):
    """Anything that judges responses. It never raises for what a response does to it: that is `Failed`."""

    async def score(self, request: RewardRequest) -> Outcome: ...


class RunningReward(Reward, Protocol):
    """A reward with processes or connections of its own. `score` from `start` to `close`, as often and as concurrently
    as wished; both are safe to call when the other has failed."""

    async def start(self) -> None:
        """Raises RewardUnavailable."""

    async def close(self) -> None: ...

    def take_events(self) -> Counter[str]:
        """What happened beside outcomes since the last call, by name: workers replaced, requests tried again."""
        ...


class Events(Counter[str]):
    """Counts by name that are read once."""

    def take(self) -> Counter[str]:
        taken = Counter(self)
        self.clear()
        return taken


class RewardUnavailable(RuntimeError):
    """The reward cannot serve on this machine; the message says why."""


def outcome_name(outcome: Outcome) -> str:
    """The name under which an outcome is counted; every outcome has one."""
    match outcome:
        case Scored(correct=True):
            return "correct"
        case Scored(verdict=verdict):
            return f"wrong_{verdict}" if verdict else "wrong"
        case Unparsable():
            return "unparsable"
        case Failed(reason=reason):
            return f"failed_{reason}"
