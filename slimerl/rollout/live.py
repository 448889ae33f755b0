"""Tokens that are passed on while an engine makes them. Pure.

Flows in: the tokens of one request, as they come, of one try after the other. Flows out: the same, to whoever reads
along; and the rest of the request for another try, where one fails.
Invariant: what was told stays. It is checked before it is told, and whatever comes of the request begins with it: a try
that fails behind it is gone on with, not made again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from slimerl.engine.protocol import Generation, SamplingParams

if TYPE_CHECKING:
    from slimerl.rollout.dispatch import GenerateRequest

Told = Callable[[Generation], None]
"""Given the tokens that are new."""


@dataclass
class LiveTokens:
    """Of one request. `proven`: whether it is known by now that tokens were sampled with weights that are served; until
    then they wait. `check` raises where they were not, given the version that was served when the try began."""

    told: Told
    proven: Callable[[Generation], bool]
    check: Callable[[Generation, int], None]
    _told: list[Generation] = field(default_factory=list)
    _of_tries: int = 0
    """Of these, those of the tries before."""
    _waiting: deque[Generation] = field(default_factory=deque)
    _since: int = 0

    def begin(self, version: int) -> None:
        """Another try, which serves `version`."""
        self._of_tries, self._since = len(self._told), version
        self._waiting.clear()

    def take(self, new: Generation) -> None:
        self._waiting.append(new)
        while self._waiting and self.proven(self._waiting[0]):
            self.check(self._waiting[0], self._since)
            self._told.append(self._waiting.popleft())
            self.told(self._told[-1])

    def ended(self, params: SamplingParams) -> Generation | None:
        """What the try has told, if nothing can follow, though it failed. `params`: of the try."""
        if self._of_tries == len(self._told):
            return None
        kept = _joined(self._told[self._of_tries :])
        if kept.tokens[-1] in params.stop_token_ids:
            return msgspec.structs.replace(kept, finish_reason="stop")
        if len(kept.tokens) == params.max_new_tokens:
            return msgspec.structs.replace(kept, finish_reason="length")
        return None

    def rest(self, request: "GenerateRequest") -> "GenerateRequest":
        """What is left of a request whose last try failed, be it before `begin`."""
        tokens = [token for new in self._told[self._of_tries :] for token in new.tokens]
        self._of_tries = len(self._told)
        left = request.params.max_new_tokens - len(tokens)
        params = msgspec.structs.replace(request.params, max_new_tokens=left)
        return msgspec.structs.replace(request, tokens=(*request.tokens, *tokens), params=params)

    def whole(self, generation: Generation) -> Generation:
        """With what the tries before the last one had told."""
        return _joined([*self._told[: self._of_tries], generation]) if self._of_tries else generation


def _joined(news: list[Generation]) -> Generation:
    last = news[-1]
    return Generation(
        [token for new in news for token in new.tokens],
        [logprob for new in news for logprob in new.logprobs],
        [version for new in news for version in new.versions],
        last.finish_reason,
        last.meta,
        last.answer,
    )
