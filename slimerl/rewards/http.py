"""A service of the user's as reward.

Sent, as JSON by POST: `{"sample_id", "prompt", "response", "answer"}`, all text. Expected with status 200:
`{"reward": 0.7, "correct": true}`, or `{"unparsable": true}` where the response holds nothing to judge; further keys
are allowed. Anything else is a failure with a name of its own, and says nothing of the response.
"""

import math
from dataclasses import dataclass

import msgspec

from slimerl.rewards.outcome import Failed, Outcome, RewardRequest, Scored, Unparsable
from slimerl.rewards.remote import RemoteFailure, RemoteScorer

SENT = ("sample_id", "prompt", "response", "answer")


class _Verdict(msgspec.Struct, frozen=True):
    reward: float | None = None
    correct: bool | None = None
    unparsable: bool = False


@dataclass(frozen=True)
class HttpScorer(RemoteScorer):
    async def score(self, request: RewardRequest) -> Outcome:
        try:
            texts = {name: getattr(request, name) for name in SENT}
            return _outcome(await self.remote.post(texts))
        except RemoteFailure as failure:
            return Failed(failure.reason, str(failure))


def _outcome(body: bytes) -> Outcome:
    try:
        verdict = msgspec.json.decode(body, type=_Verdict)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Failed("garbled", f"not a verdict: {error}: {body[:200].decode(errors='replace')}")
    if verdict.unparsable:
        return Unparsable()
    if verdict.reward is None or verdict.correct is None:
        return Failed("garbled", f"a verdict without reward or correct: {body[:200].decode(errors='replace')}")
    if not math.isfinite(verdict.reward):
        return Failed("not_finite", f"the reward is {verdict.reward}")
    return Scored(verdict.reward, verdict.correct)
