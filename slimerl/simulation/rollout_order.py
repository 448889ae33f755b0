"""Which conversation is begun next: simple orders, to compare with. Pure.

Flows in: conversations that wait, and what became of those begun. Flows out: the next one.
Invariant: what was added is taken exactly once.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from slimerl.simulation.rollout_trace import Conversation


class Order(Protocol):
    """Conversations that wait to be begun."""

    def add(self, conversations: Iterable[Conversation]) -> None: ...

    def take(self) -> Conversation: ...

    def finished(self, one: Conversation) -> None: ...

    def __len__(self) -> int: ...


class FirstCome:
    """As they come, siblings together."""

    def __init__(self) -> None:
        self._waiting: deque[Conversation] = deque()

    def add(self, conversations: Iterable[Conversation]) -> None:
        self._waiting.extend(conversations)

    def take(self) -> Conversation:
        return self._waiting.popleft()

    def finished(self, one: Conversation) -> None:
        pass

    def __len__(self) -> int:
        return len(self._waiting)


class LongestFirst(FirstCome):
    """Those of a call of `add` before those of the next; of these, the group first that history says is longest, whole
    (siblings one after the other, so that they find their prompt cached)."""

    def add(self, conversations: Iterable[Conversation]) -> None:
        self._waiting.extend(sorted(conversations, key=lambda one: (-one.predicted, one.group)))


class ProbesFirst:
    """Without history: one sibling of each group first, as a probe; then the siblings of the probe that is longest.

    A probe that still runs when others have finished is longer than they are, and its group goes first.
    """

    def __init__(self) -> None:
        self._probes: deque[Conversation] = deque()
        self._siblings: dict[str, deque[Conversation]] = {}
        """By group, those whose probe was begun later behind."""
        self._length: dict[str, int] = {}
        """Of probes that have finished, by group."""

    def add(self, conversations: Iterable[Conversation]) -> None:
        for one in conversations:
            if one.group in self._siblings:
                self._siblings[one.group].append(one)
            else:
                self._siblings[one.group] = deque()
                self._probes.append(one)

    def take(self) -> Conversation:
        if self._probes:
            return self._probes.popleft()
        waiting = [group for group, siblings in self._siblings.items() if siblings]
        longest = max(waiting, key=lambda group: self._length.get(group, 1 << 40))
        return self._siblings[longest].popleft()

    def finished(self, one: Conversation) -> None:
        self._length.setdefault(one.group, one.answer_tokens)

    def __len__(self) -> int:
        return len(self._probes) + sum(len(siblings) for siblings in self._siblings.values())
