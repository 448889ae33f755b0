"""The text of a reply while it grows. Pure.

Flows in: tokens, part by part as engines answer. Flows out: text that will not change any more, for clients that read
along, and the whole of it in the end.
Invariants: what was told in parts is, together, what is told at the end; half of a character, what may become a stop
text, and tool calls are held back until they are known; tokens are never changed by any of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimerl.rollout.gateway.tool_calls import OPEN, held_back, split_calls

Decode = Callable[[Sequence[int]], str]

_HALF = "�"
"""What decoders write for a character whose last bytes are still to come."""


@dataclass
class Reply:
    """`reads_calls`: the client gave tools, and text of calls is not told as text. `call_prefix`: of calls' ids."""

    decode: Decode
    stops: tuple[str, ...] = ()
    reads_calls: bool = False
    call_prefix: str = "call_"
    tokens: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """After `end`."""
    malformed_call: bool = False
    decoded: str = ""
    """All of it, whatever was asked to be left out."""
    _text: str = ""
    _told: int = 0

    @property
    def text(self) -> str:
        """What is so far, up to a stop text; after `end` without calls."""
        return self._text

    def take(self, tokens: Sequence[int]) -> bool:
        """The next tokens; whether a stop text is now in the reply."""
        self.tokens.extend(tokens)
        self.decoded = self.decode(self.tokens)
        found = [place for place in (self.decoded.find(stop) for stop in self.stops) if place >= 0]
        self._text = self.decoded[: min(found)] if found else self.decoded
        return bool(found)

    def tell(self) -> str:
        """Text that was not told yet and will not change."""
        text = self._text.rstrip(_HALF)
        if self.reads_calls and OPEN in text:
            end = text.index(OPEN)
        else:
            end = len(text) - held_back(text, (*self.stops, OPEN) if self.reads_calls else self.stops)
        told = self._text[self._told : end]
        self._told = max(self._told, end)
        return told

    def end(self) -> str:
        """The reply is whole: the text that was not told yet."""
        if self.reads_calls:
            split = split_calls(self._text, self.call_prefix)
            if split is None:
                self.malformed_call = True
            else:
                self._text, self.calls = split
        told, self._told = self._text[self._told :], len(self._text)
        return told
