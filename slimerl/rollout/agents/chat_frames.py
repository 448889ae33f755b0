"""What a chat template writes between the end of an answer and the beginning of the next. Pure.

Flows in: a template as a function of messages, the texts that may end an answer. Flows out: the text around so many
observations. Invariant: it is the template's own: rendered around marks, and cut at these.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

Render = Callable[[list[dict[str, str]]], str]
"""Messages → text, up to where the next answer begins."""
_SAID, _SEEN = "slimerl-said", "slimerl-seen-"


class NoFrame(ValueError):
    """The template cannot show what is to be observed."""


class ChatFrames:
    """`role`: whose messages observations are: `tool`, or `user`."""

    def __init__(self, render: Render, ends: Sequence[str], role: str) -> None:
        """Raises NoFrame."""
        self._render, self._ends, self._role = render, ends, role
        self.around = lru_cache(maxsize=64)(self._around)
        self.around(1)

    def _around(self, count: int) -> tuple[str, ...]:
        """What stands before, between and behind `count` observations."""
        marks = [f"{_SEEN}{number}-" for number in range(count)]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        messages += [{"role": self._role, "content": mark} for mark in marks]
        try:
            text = self._render(messages)
        except Exception as error:
            raise NoFrame(f"the chat template refuses messages of the role '{self._role}': {error}") from error
        if not all(text.count(mark) == 1 for mark in (_SAID, *marks)):
            raise NoFrame(f"the chat template does not write out messages of the role '{self._role}'")
        rest = text.partition(_SAID)[2]
        # the policy has sampled the end of its answer itself
        rest = next((rest.removeprefix(end) for end in self._ends if end and rest.startswith(end)), rest)
        parts = []
        for mark in marks:
            before, _, rest = rest.partition(mark)
            parts.append(before)
        return (*parts, rest)
