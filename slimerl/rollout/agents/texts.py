"""Between tokens and text, off the event loop.

Flows in: tokens that the policy sampled; pieces of text that it is to observe. Flows out: text; tokens.
Invariants: one piece after the other is encoded, by itself, and never anything that is in a sample already; what comes
from elsewhere (`Foreign`) cannot write special tokens, such as the end of a turn.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Text of a tool or an environment."""

    text: str


Piece = str | Foreign


class Tokenizer(Protocol):
    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_piece(self, text: str, special: bool) -> list[int]: ...


class Texts:
    """One thread: a tokenizer is not made for more, and each piece of work is short."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "texts")

    async def read(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return await self.do(lambda: self._tokenizer.decode(tokens))

    async def write(self, pieces: Sequence[Piece]) -> list[int]:
        return await self.do(lambda: self._encoded(pieces))

    async def do(self, work: Callable[[], Result]) -> Result:
        """Anything else that takes time in proportion to a text."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encoded(self, pieces: Sequence[Piece]) -> list[int]:
        tokens: list[int] = []
        for piece in pieces:
            foreign = isinstance(piece, Foreign)
            tokens += self._tokenizer.encode_piece(piece.text if isinstance(piece, Foreign) else piece, not foreign)
        return tokens
