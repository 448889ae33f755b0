"""What scoring a response can come to, and the interface of everything that scores.

Three outcomes that are never confused: a response was judged (right or wrong), it holds nothing that could be judged,
or the judging itself failed. The last one says nothing about the response.
"""

from typing import Protocol

import msgspec

UNPARSABLE_REWARD = 0.0


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Judged. `correct` is accuracy; `reward` may be shaped."""

    reward: float
    correct: bool


class Unparsable(msgspec.Struct, frozen=True, tag="unparsable"):
    """The response holds no answer. It earns `UNPARSABLE_REWARD`, is not correct, and is counted apart."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The judging failed. `reason`: one word, for counting; `detail`: for the log."""

    reason: str
    detail: str = ""


Outcome = Scored | Unparsable | Failed


class RewardRequest(msgspec.Struct, frozen=True):
    """What is to be judged. `response`: decoded text without special tokens; `answer`: the row's."""

    sample_id: str
    response: str
    answer: str


class Reward(Protocol):
    """Anything that judges responses. It never raises for what a response does to it: that is `Failed`."""

    async def score(self, request: RewardRequest) -> Outcome: ...
