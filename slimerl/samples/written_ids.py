"""Token ids as JSON writes them: who passes thousands of them on neither reads nor writes the numbers.

Flows in: the text of a list of ids from a request, or ids. Flows out: the same text for the next request, the ids
packed, and tuples of those that somebody looks at.
Invariants: text and packed ids are the same ids; the text is canonical, each id in decimal with a comma behind it
("7,12,"), so that of two lists one begins with the other exactly where their texts do.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, overload

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

_read_ids = msgspec.json.Decoder(list[int]).decode
_write = msgspec.json.Encoder().encode


class NotPlain(ValueError):
    """The text is none of ids as this module writes them."""


class WrittenIds(Sequence[int]):
    """See the module's docstring. `text` and `packed` must be the same ids."""

    __slots__ = ("keys", "packed", "text")

    def __init__(self, text: bytes, packed: "array[int]") -> None:
        self.text = text
        self.packed = packed
        self.keys: list[int] | None = None
        """Of its blocks, for who hashes them (`rollout/prefix_index`): once for all requests with it."""

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        return tuple(self.packed[at]) if isinstance(at, slice) else self.packed[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.packed)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, WrittenIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)


Tokens = tuple[int, ...] | WrittenIds
"""Ids of a request that goes to an engine."""


def written(ids: Sequence[int]) -> bytes:
    """Canonical text of a list or tuple."""
    return _write(ids)[1:-1] + b"," if ids else b""


def canonical(data: bytes, begin: int = 0, end: int | None = None) -> bytes:
    """The text for what stands there between the brackets of a list; as far as `read` can tell whether it is one."""
    if data.find(b" ", begin, end) >= 0:
        return data[begin:end].replace(b", ", b",") + b","
    return b"".join((memoryview(data)[begin:end], b","))


def read(text: bytes) -> "array[int]":
    """Packed ids of canonical text.

    Raises:
        NotPlain: it is not canonical, or an id is none.
    """
    if not text:
        return array("i")
    if text.translate(None, b"0123456789,") or not text.endswith(b","):
        raise NotPlain(f"not ids with commas behind them: {text[:80]!r}")
    try:
        packed = pack(_read_ids(b"[%b]" % text[:-1]))
    except (msgspec.MsgspecError, struct.error) as error:
        raise NotPlain(str(error)) from None
    if not packed:
        raise NotPlain("a comma without an id before it")
    return packed


def pack(ids: Sequence[int]) -> "array[int]":
    """In less than half of the time that `array` takes for a list."""
    packed: array[Any] = array("i")
    packed.frombytes(struct.pack(f"{len(ids)}i", *ids))
    return packed
