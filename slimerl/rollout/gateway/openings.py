"""Prompts that sessions have opened with of late. Pure.

Flows in: texts of ids. Flows out: the ids, read once for all siblings of a group, whose sessions open with the same
prompt.
Invariants: what is found is what reading it would have given; memory is bounded, the prompt that was used the longest
ago is forgotten first.
"""

from collections import OrderedDict

import xxhash

from slimerl.samples.written_ids import WrittenIds, read

MAX_TOKENS = 1_000_000
"""Of all prompts: about 12 MB, and more groups than begin at a time."""


class Openings:
    """See the module's docstring."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._known: OrderedDict[bytes, WrittenIds] = OrderedDict()
        """By digest of the text."""
        self.tokens = 0

    def read(self, text: bytes) -> WrittenIds:
        """Raises NotPlain."""
        digest = xxhash.xxh3_128_digest(text)
        ids = self._known.get(digest)
        if ids is not None:
            self._known.move_to_end(digest)
            return ids
        ids = self._known[digest] = WrittenIds(text, read(text))
        self.tokens += len(ids)
        while self.tokens > self._max_tokens:
            self.tokens -= len(self._known.popitem(last=False)[1])
        return ids
