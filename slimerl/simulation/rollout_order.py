"""An order to compare with: first come, first served. Pure. The real one is `slimerl.rollout.order.LengthOrder`.

Flows in: what waits. Flows out: the next one. Invariant: what was added is handed out exactly once.
"""

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar

from slimerl.rollout.order import Entry, Progress

Item = TypeVar("Item")


class Order(Protocol[Item]):
    """What a simulation asks of an order; `LengthOrder` says what each call means."""

    def admit(self, group: str, prompt_id: str, batch: int) -> None: ...

    def forget(self, group: str) -> float | None: ...

    def add(self, item: Item, group: str, progress: Progress | None) -> Entry[Item]: ...

    def take(self) -> Entry[Item] | None: ...

    def sent(self, entry: Entry[Item]) -> None: ...

    def put_back(self, entry: Entry[Item]) -> None: ...

    def __len__(self) -> int: ...


class FirstCome(Generic[Item]):
    """As they come, siblings together; what goes on goes first."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: list[tuple[bool, int, Entry[Item]]] = []

    def admit(self, group: str, prompt_id: str, batch: int) -> None:
        pass

    def forget(self, group: str) -> float | None:
        return None

    def add(self, item: Item, group: str, progress: Progress | None) -> Entry[Item]:
        entry = Entry(item, group, progress, next(self._numbers))
        self.put_back(entry)
        return entry

    def take(self) -> Entry[Item] | None:
        return heapq.heappop(self._waiting)[2] if self._waiting else None

    def sent(self, entry: Entry[Item]) -> None:
        pass

    def put_back(self, entry: Entry[Item]) -> None:
        begins = entry.progress is None or not entry.progress.done
        heapq.heappush(self._waiting, (begins, entry.number, entry))

    def __len__(self) -> int:
        return len(self._waiting)
