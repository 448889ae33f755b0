"""Tokens that are passed on while an engine makes them. Pure.

Flows in: the tokens of one try, as they come. Flows out: the same, to whoever reads along; and where the try fails,
what it had until then.
Invariant: what was told stays: it is checked before it is told, and a try that fails after it ends like one that was
interrupted, so that the next goes on behind it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slimerl.engine.protocol import Generation

Told = Callable[[Generation], None]
"""Given the tokens that are new."""


@dataclass
class LiveTokens:
    """Of one try. `proven`: whether it is known by now that tokens were sampled with weights that are served; until
    then they wait. `check` raises where they were not."""

    told: Told
    proven: Callable[[Generation], bool]
    check: Callable[[Generation], None]
    _news: list[Generation] = field(default_factory=list)
    """That were told."""
    _waiting: deque[Generation] = field(default_factory=deque)

    def take(self, new: Generation) -> None:
        self._waiting.append(new)
        while self._waiting and self.proven(self._waiting[0]):
            self.check(self._waiting[0])
            self._news.append(self._waiting.popleft())
            self.told(self._news[-1])

    def kept(self) -> Generation | None:
        """All that was told, as if the engine had aborted it there; None: nothing was."""
        if not self._news:
            return None
        news = self._news
        return Generation(
            [token for new in news for token in new.tokens],
            [logprob for new in news for logprob in new.logprobs],
            [version for new in news for version in new.versions],
            "abort",
            news[-1].meta,
            news[-1].answer,
        )
