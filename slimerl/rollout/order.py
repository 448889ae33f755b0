"""Which of the requests that wait is sent next: the longest first, as far as lengths are known. Pure.

Flows in: groups as they are admitted, requests that wait for a slot, responses that end (`ResponseLengths`). Flows out:
the next request to send. Whom it is sent to is the router's choice, which spreads a group, and so the longest
requests, over engines; an order that hands the longest ones to one engine loses what it has won.

What goes first:

1. What goes on: a sample that has tokens (next chunk, next turn, interrupted by new weights). Its group waits for it.
2. The group that is due in the earlier batch. Longest-first over all batches would let short groups of the present
   batch wait for long ones of the next, and the trainer with them.
3. A probe, the first sample of each group of whose prompt nothing is known.
4. The group whose next response is expected to be longest. One whose probe still runs is longer than all that have
   ended. Siblings follow each other, so that they find their prompt cached.

Invariant: what was added is handed out, or removed, exactly once.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Generic, TypeVar

from slimerl.rollout.lengths import ResponseLengths

Item = TypeVar("Item")
_Key = tuple[int, int, float]
"""Batch, kind, negative expectation: the least goes first."""
_PROBE, _REST = 0, 1
_NO_BATCH = -1
"""Of requests whose group was never admitted, or that were sent before and failed: they go before all others."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a sample that a request is for."""

    prompt_id: str
    """Whose earlier responses foretell its length."""
    done: int
    """Tokens that its response has."""
    left: int
    """Tokens that it may still get, in this request and in later ones."""


@dataclass(slots=True, eq=False)
class Entry(Generic[Item]):
    """One request that waits. Entries go back and forth between the order and whoever takes them."""

    item: Item
    group: str
    progress: Progress | None
    number: int
    """First come, among equals."""
    waits: bool = True


@dataclass(slots=True, eq=False)
class _Group(Generic[Item]):
    name: str
    prompt_id: str
    batch: int
    number: int
    probed: bool = False
    """One of its samples was sent."""
    expected: int | None = None
    """Tokens of its next response; stays as it was first foretold: siblings that end first are the shorter ones, and a
    long group must not lose its place by them."""
    foretold: list[int] = field(default_factory=list)
    """Of each sample, when it was sent."""
    key: _Key | None = None
    """Its place; None: it has none, as nothing of it waits."""
    waiting: list[tuple[int, Entry[Item]]] = field(default_factory=list)
    """A heap; those that wait no more lie in it until they come up."""


class LengthOrder(Generic[Item]):
    """See the module's docstring. `lengths` foretells; the order follows what it learns."""

    def __init__(self, lengths: ResponseLengths | None = None) -> None:
        self.lengths = lengths or ResponseLengths()
        self.lengths.learnt.append(self._learnt)
        self._numbers = count()
        self._waiting = 0
        self._going_on: list[tuple[int, int, int, Entry[Item]]] = []
        self._groups: dict[str, _Group[Item]] = {}
        self._of_prompt: dict[str, dict[str, None]] = {}
        """Prompt → its groups."""
        self._heap: list[tuple[_Key, int, _Group[Item]]] = []
        """Groups that have something waiting; entries whose key is not their group's are outdated."""

    # --- groups

    def admit(self, group: str, prompt_id: str, batch: int) -> None:
        """Samples of a group will come. `batch`: number of the batch that it is due in, as they are handed out."""
        self._groups[group] = _Group(group, prompt_id, batch, next(self._numbers))
        self._of_prompt.setdefault(prompt_id, {})[group] = None

    def forget(self, group: str) -> float | None:
        """No sample of the group will wait any more. Unknown ones are let pass.

        Returns:
            The mean length that was foretold of its samples as they were sent; None where none was.
        """
        known = self._groups.pop(group, None)
        if known is None:
            return None
        groups = self._of_prompt[known.prompt_id]
        del groups[group]
        if not groups:
            del self._of_prompt[known.prompt_id]
        known.key = None
        for _, entry in known.waiting:
            if entry.waits:
                heapq.heappush(self._going_on, (known.batch, 0, entry.number, entry))
        return fmean(known.foretold) if known.foretold else None

    # --- requests

    def add(self, item: Item, group: str, progress: Progress | None) -> Entry[Item]:
        """A request waits. Those without progress go before all others, first come first."""
        entry = Entry(item, group, progress, next(self._numbers))
        self._insert(entry)
        return entry

    def take(self) -> Entry[Item] | None:
        """The next one, which waits no more then; None where none does."""
        entry = self._next_going_on() or self._next_of_groups()
        if entry is not None:
            entry.waits = False
            self._waiting -= 1
        return entry

    def sent(self, entry: Entry[Item]) -> None:
        """What was taken is on its way."""
        group, progress = self._groups.get(entry.group), entry.progress
        if group is None or progress is None or progress.done:
            return
        group.foretold.append(self.lengths.expected(progress.prompt_id, 0, progress.left))
        if not group.probed:
            group.probed = True
            self._place(group)

    def put_back(self, entry: Entry[Item]) -> None:
        """What was taken cannot be sent yet: it waits again, at its place."""
        entry.waits = True
        self._insert(entry)

    def remove(self, entry: Entry[Item]) -> None:
        """It will not be sent. One that does not wait is let pass."""
        if entry.waits:
            entry.waits = False
            self._waiting -= 1

    def __len__(self) -> int:
        return self._waiting

    def _insert(self, entry: Entry[Item]) -> None:
        self._waiting += 1
        group, progress = self._groups.get(entry.group), entry.progress
        if group is None or progress is None or progress.done:
            batch = group.batch if group is not None and progress is not None else _NO_BATCH
            left = self.lengths.expected(progress.prompt_id, progress.done, progress.left) if progress else 0
            heapq.heappush(self._going_on, (batch, -left, entry.number, entry))
            return
        heapq.heappush(group.waiting, (entry.number, entry))
        self._place(group)

    def _next_going_on(self) -> Entry[Item] | None:
        while self._going_on:
            entry = heapq.heappop(self._going_on)[3]
            if entry.waits:
                return entry
        return None

    def _next_of_groups(self) -> Entry[Item] | None:
        while self._heap:
            key, _, group = heapq.heappop(self._heap)
            if key != group.key:
                continue
            group.key = None
            while group.waiting:
                entry = heapq.heappop(group.waiting)[1]
                if entry.waits:
                    self._place(group)
                    return entry
        return None

    def _place(self, group: _Group[Item]) -> None:
        """Its place among the groups, by what is known now."""
        if not group.waiting:
            return
        if group.expected is None and self.lengths.knows(group.prompt_id):
            progress = group.waiting[0][1].progress
            left = progress.left if progress is not None else 1
            group.expected = self.lengths.expected(group.prompt_id, 0, left)
        if group.expected is not None:
            key = (group.batch, _REST, -float(group.expected))
        else:
            key = (group.batch, _REST if group.probed else _PROBE, float("-inf"))
        if key != group.key:
            group.key = key
            heapq.heappush(self._heap, (key, group.number, group))

    def _learnt(self, prompt_id: str) -> None:
        for name in self._of_prompt.get(prompt_id, ()):
            group = self._groups[name]
            if group.expected is None:
                self._place(group)
