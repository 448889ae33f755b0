"""Which engine holds the KV of which token prefix, as far as the router knows. Pure.

Flows in: token ids as requests are dispatched, engines as they come and go, new weight versions. Flows out: for a
prompt, how many leading blocks each engine is believed to hold.

A prompt is cut into blocks of `BLOCK_TOKENS`; the key of a block is the hash of its tokens and of the key before it,
so that one key stands for a whole prefix. An engine's set is a bit mask, so that 64 engines are matched in one walk
over the prompt's blocks. Example, with blocks of two tokens::

    keys = hash_blocks((5, 6, 7, 8, 9))      # 2 whole blocks; token 9 is in none
    index.insert(slot, version=3, keys=keys)
    index.match(version=3, keys=keys)        # {slot: 2}
    index.match(version=4, keys=keys)        # {}: KV of older weights is no KV

Invariants: nothing is found under another version than it was inserted under; an engine never holds more than
`blocks_per_engine` blocks, its least recently used prefixes go first, and of a prefix the end goes before the start
(as in the engine's own cache), so that what is left is still a prefix; a slot that was dropped holds nothing. So a
prompt that goes on from one that is held costs what is new of it: how much is held is found by halving, and the blocks
of one prompt are as recent as its end.
The index is advice: a wrong entry costs a prefill, never a wrong token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, repeat
from struct import Struct

from xxhash import xxh3_64_intdigest

from slimerl.samples.written_ids import Tokens, WrittenIds

BLOCK_TOKENS = 64
"""Fine enough to tell prompts apart that share a system prompt, coarse enough that 4k tokens are 64 look-ups."""
_BLOCK = Struct(f"{BLOCK_TOKENS * array('i').itemsize}s")
"""Of packed ids, as bytes."""
_WITNESSES = 4
"""Blocks of a known prefix that are hashed again before the rest is believed: its ends and two in between."""


def hash_blocks(tokens: Tokens, known: Sequence[int] = ()) -> list[int]:
    """Keys of the whole blocks of `tokens`; those of `known` are taken over, so that only new tokens are hashed.

    Args:
        tokens: token ids of a prompt, below 2^31.
        known: keys of an earlier prompt that may be a prefix of this one (the turn before, a sibling). It is believed
            after `_WITNESSES` of its blocks were hashed again and agree; where they do not, everything is hashed.
    """
    if isinstance(tokens, WrittenIds):
        if tokens.keys is None:
            tokens.keys = _hashed(tokens, known)
        return tokens.keys
    return _hashed(tokens, known)


def _hashed(tokens: Tokens, known: Sequence[int]) -> list[int]:
    ids = memoryview(tokens.packed) if isinstance(tokens, WrittenIds) else tokens
    count = min(len(known), len(ids) // BLOCK_TOKENS)
    if count and not _agrees(ids, known, count):
        count = 0
    keys = list(known[:count])
    key = keys[-1] if keys else 0
    whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    for (block,) in _BLOCK.iter_unpack(_packed(ids[count * BLOCK_TOKENS : whole])):
        key = xxh3_64_intdigest(block, key)
        keys.append(key)
    return keys


def _packed(ids: tuple[int, ...] | memoryview) -> bytes | memoryview:
    """As integers of the machine, which is what is hashed."""
    return ids if isinstance(ids, memoryview) else _integers(len(ids)).pack(*ids)


@lru_cache(maxsize=1024)
def _integers(count: int) -> Struct:
    # its own method takes two thirds of the time of the module's function, which copies what it is given
    return Struct(f"{count}i")


def _agrees(ids: tuple[int, ...] | memoryview, known: Sequence[int], count: int) -> bool:
    """The last block first: it differs whenever the history was shortened or lengthened before it."""
    for part in range(_WITNESSES - 1, -1, -1):
        block = (count - 1) * part // (_WITNESSES - 1)
        witness = ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        if xxh3_64_intdigest(_packed(witness), known[block - 1] if block else 0) != known[block]:
            return False
    return True


@dataclass(slots=True)
class _Holding:
    """What a slot holds: a tree of blocks, and the prompts that end in it."""

    bound: int
    """Blocks at most."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Key → blocks that are held and come next behind it."""
    ends: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Last blocks of prompts, the least recently used first. What only goes on from another one is in its place."""

    def depth(self, keys: Sequence[int]) -> int:
        """Leading blocks that are held."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self.blocks:
                low = middle + 1
            else:
                high = middle
        return low


class PrefixIndex:
    """See the module's docstring. Engines are small integers ("slots") that the caller hands out and may reuse."""

    def __init__(self, version: int = -1) -> None:
        self._version = version
        self._holders: dict[int, int] = {}
        """Block key → bit mask of the slots that hold it."""
        self._before: dict[int, int] = {}
        """Key of each of these blocks → key of the block before it; 0: it is the first."""
        self._held: dict[int, _Holding] = {}
        """By slot."""
        self._everyone = 0

    @property
    def version(self) -> int:
        """Weight version whose KV is indexed."""
        return self._version

    def add(self, slot: int, blocks_per_engine: int) -> None:
        """An engine that holds nothing yet, of room for `blocks_per_engine` blocks."""
        self.drop(slot)
        self._held[slot] = _Holding(blocks_per_engine)
        self._everyone |= 1 << slot

    def drop(self, slot: int) -> None:
        """The engine is gone, or its cache is empty for another reason; unknown slots are let pass."""
        held = self._held.pop(slot, None)
        if held is None:
            return
        self._everyone &= ~(1 << slot)
        for key in held.blocks:
            self._forget(key, slot)

    def renew(self, version: int) -> None:
        """All KV is of older weights from now on: engines stay, and hold nothing."""
        self._version = version
        self._holders.clear()
        self._before.clear()
        for held in self._held.values():
            held.blocks.clear()
            held.ends.clear()

    def insert(self, slot: int, version: int, keys: Sequence[int]) -> None:
        """A prompt was sent to an engine: it holds these blocks, and used them last. Ignored for another version."""
        held = self._held.get(slot)
        if held is None or version != self._version:
            return
        if len(keys) > held.bound:
            keys = keys[: held.bound]
        if not keys:
            return
        bit, blocks, holders = 1 << slot, held.blocks, self._holders
        known = held.depth(keys)
        before, new = keys[known - 1] if known else 0, keys[known:]
        held.ends.pop(before, None)
        held.ends[keys[-1]] = None
        if known and new:
            blocks[before] += 1
        for key in new:
            holders[key] = holders.get(key, 0) | bit
        self._before.update(zip(new, (before, *new), strict=False))
        blocks.update(dict.fromkeys(new, 1))
        if new:
            blocks[keys[-1]] = 0
        while len(blocks) > held.bound:
            self._shorten_oldest(slot, held)

    def _shorten_oldest(self, slot: int, held: _Holding) -> None:
        """As far as need be: take the end off that the prompt which was used the longest ago shares with no other."""
        blocks = held.blocks
        key, _ = held.ends.popitem(last=False)
        while key and not blocks[key] and key not in held.ends:
            if len(blocks) <= held.bound:
                held.ends[key] = None
                held.ends.move_to_end(key, last=False)
                return
            before = self._before[key]
            del blocks[key]
            self._forget(key, slot)
            if before:
                blocks[before] -= 1
            key = before

    def depth(self, slot: int, version: int, keys: Sequence[int]) -> int:
        """Leading blocks that one slot holds; as `match`, without a walk over them."""
        held = self._held.get(slot) if version == self._version else None
        return held.depth(keys) if held is not None else 0

    def match(self, version: int, keys: Sequence[int]) -> dict[int, int]:
        """Slot → leading blocks that it holds, without the slots that hold none."""
        found: dict[int, int] = {}
        alive = self._everyone if version == self._version else 0
        depth = 0
        for holding, run in groupby(map(self._holders.get, keys, repeat(0))):
            if holding & alive != alive:
                if depth:
                    _note(found, alive & ~holding, depth)
                alive &= holding
                if not alive:
                    return found
            depth += len(list(run))
        if depth:
            _note(found, alive, depth)
        return found

    def blocks(self, slot: int) -> int:
        """Blocks that a slot holds."""
        held = self._held.get(slot)
        return len(held.blocks) if held is not None else 0

    def __len__(self) -> int:
        """Blocks held, each counted once for every slot that holds it: what the memory grows with."""
        return sum(len(held.blocks) for held in self._held.values())

    def _forget(self, key: int, slot: int) -> None:
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key], self._before[key]


def _note(found: dict[int, int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        found[low.bit_length() - 1] = depth
        mask ^= low
