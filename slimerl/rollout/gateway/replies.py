"""The text of a reply while it grows. Pure.

Flows in: tokens, as engines make them or part by part. Flows out: text and tool calls that will not change any more,
for clients that read along, and the whole of it in the end.
Invariants: what was told in pieces is, together, what is told at the end; half of a character, what may become a stop
text, and a tool call that has not ended are held back until they are known; what was told is never taken back; tokens
are never changed by any of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slimerl.rollout.gateway.tool_calls import CLOSE, OPEN, held_back, read_call

Decode = Callable[[Sequence[int]], str]
Step = Callable[[int], str]
"""The next token → the text that is complete with it; empty while it is half of a character."""

CONTEXT = 16
"""Tokens before others that their text may depend on."""

Piece = str | dict[str, Any]
"""Text, or a tool call."""


class Reply(msgspec.Struct, eq=False):
    """`reads_calls`: the client gave tools, and text of calls is not told as text. `call_prefix`: of calls' ids;
    `step`: for a client that reads along."""

    decode: Decode
    stops: tuple[str, ...] = ()
    reads_calls: bool = False
    call_prefix: str = "call_"
    step: Step | None = None
    trusts_text: bool = False
    """What an engine says that all tokens together are is not decoded again."""
    tokens: list[int] = msgspec.field(default_factory=list)
    calls: list[dict[str, Any]] = msgspec.field(default_factory=list)
    malformed_call: bool = False
    """It begins a call that cannot be read: from there on all is text."""
    decoded: str = ""
    """All of it, whatever was asked to be left out."""
    _settled: int = 0
    """Tokens whose text is in `decoded`; where nobody reads along, none."""
    _texts: list[str] = msgspec.field(default_factory=list)
    _told: int = 0
    """Characters of `decoded` that became pieces."""
    _stop: int | None = None
    """Where a stop text begins."""

    @property
    def text(self) -> str:
        """What was told as text; after `end` all of it."""
        return "".join(self._texts)

    def take(self, tokens: Sequence[int], text: object = None) -> bool:
        """The next tokens, and their text where their engine has said it; whether a stop text is now in the reply."""
        self.tokens.extend(tokens)
        before = len(self.decoded)
        if self.step is None:
            told = text if self.trusts_text and isinstance(text, str) and len(tokens) == len(self.tokens) else ""
            self.decoded, before = told or self.decode(self.tokens), 0
        else:
            for number, token in enumerate(tokens, len(self.tokens) - len(tokens) + 1):
                if text := self.step(token):
                    self.decoded += text
                    self._settled = number
        return self._stopped(before)

    def tell(self) -> list[Piece]:
        """What was not told yet and will not change. For one who reads along alone."""
        return self._pieces(ended=False)

    def end(self) -> list[Piece]:
        """The reply is whole: what was not told yet."""
        if self.step is not None:
            before = len(self.decoded)
            self.decoded += self._unsettled()
            self._stopped(before)
        return self._pieces(ended=True)

    def _unsettled(self) -> str:
        """What the last tokens say that wait for the rest of a character."""
        start = max(0, self._settled - CONTEXT)
        known, whole = self.decode(self.tokens[start : self._settled]), self.decode(self.tokens[start:])
        # bytes that are no characters may read otherwise once others follow them
        return whole[len(known) :] if whole.startswith(known) else ""

    def _stopped(self, before: int) -> bool:
        """`before`: characters that were looked at already."""
        if self._stop is None and self.stops:
            start = max(0, before + 1 - max(map(len, self.stops)))
            found = [place for place in (self.decoded.find(stop, start) for stop in self.stops) if place >= 0]
            self._stop = min(found, default=None)
        return self._stop is not None

    def _pieces(self, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        end = len(self.decoded) if self._stop is None else self._stop
        while self.reads_calls and not self.malformed_call:
            begin = self.decoded.find(OPEN, self._told, end)
            if begin < 0:
                break
            self._tell_text(pieces, begin)
            close = self.decoded.find(CLOSE, begin, end)
            if close < 0 and not ended:
                return pieces
            call = read_call(self.decoded[begin + len(OPEN) : close], f"{self.call_prefix}{len(self.calls)}")
            if close < 0 or call is None:
                self.malformed_call = True
            else:
                self.calls.append(call)
                pieces.append(call)
                self._told = close + len(CLOSE)
        if not ended and self._stop is None:
            markers = (*self.stops, OPEN) if self.reads_calls else self.stops
            end -= held_back(self.decoded[self._told : end], markers)
        self._tell_text(pieces, end)
        return pieces

    def _tell_text(self, pieces: list[Piece], end: int) -> None:
        if text := self.decoded[self._told : end]:
            pieces.append(text)
            self._texts.append(text)
            self._told = end
