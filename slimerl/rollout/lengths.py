"""How many tokens a response will still have, by the responses that there have been. Pure.

Flows in: the length of each response that ended. Flows out: an expectation for those under way.
Invariants: bounded memory, the prompts that were seen longest ago are forgotten; never more than a request may
generate.

Siblings under way with it, and the epoch before, tell the length of a prompt's next response best; where there are
none that are longer than what it has already, all recent responses do.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from statistics import fmean

MAX_PROMPTS = 50_000
"""About 15 MB."""
PER_PROMPT = 16
"""Two groups of eight: the present one, and the one of the epoch before."""
RECENT = 256
"""Over all prompts: a batch or less, since lengths change as the policy learns."""


class ResponseLengths:
    """`observe` each response that ended, ask `expected` of those under way."""

    def __init__(self, prompts: int = MAX_PROMPTS) -> None:
        self._prompts = prompts
        self._of: OrderedDict[str, array[int]] = OrderedDict()
        self._recent: deque[int] = deque(maxlen=RECENT)
        self.learnt: list[Callable[[str], None]] = []
        """Called with the prompt of each response that ended."""

    def observe(self, prompt_id: str, tokens: int) -> None:
        """A response ended after `tokens`."""
        lengths = self._of.setdefault(prompt_id, array("I"))
        self._of.move_to_end(prompt_id)
        lengths.append(tokens)
        del lengths[:-PER_PROMPT]
        self._recent.append(tokens)
        if len(self._of) > self._prompts:
            self._of.popitem(last=False)
        for tell in self.learnt:
            tell(prompt_id)

    def knows(self, prompt_id: str) -> bool:
        """Has a response to this very prompt ended, and is it remembered?"""
        return prompt_id in self._of

    def expected(self, prompt_id: str, done: int, budget: int) -> int:
        """Tokens that a response which has `done` will still get, of the `budget` that it may; at least 1."""
        for lengths in (self._of.get(prompt_id, ()), self._recent):
            longer = [length for length in lengths if length > done]
            if longer:
                return max(1, min(budget, round(fmean(longer) - done)))
        return budget
