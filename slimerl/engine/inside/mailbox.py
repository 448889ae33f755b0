"""Orders from the coordinator of a sync to its members, and their reports, through the coordinator's store.

Flows in: JSON. Flows out: JSON. Invariants: each order is read once, by one member, and answered once; a member
notices at once that the coordinator is gone (its connection breaks) or that it is to stop.

Orders are compressed: a store takes 8 MiB in one piece, and those that say what a rank holds repeat themselves.
Keys: `PREFIX/MEMBER/order/N` and `PREFIX/MEMBER/report/N`, N counting from 1. The prefix is a secret.
"""

import json
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, TCPStore

from slimerl.engine.inside.store import connect_store
from slimerl.resilience.deadline import Deadline

Message = dict[str, Any]

_LONGEST_S = 86400.0
"""Of one wait on the store; torch warns each time that one is in vain."""


class CoordinatorGone(RuntimeError):
    """The store cannot be reached any more."""


def packed(order: Message) -> bytes:
    """As it lies in the store."""
    return zlib.compress(json.dumps(order).encode(), 1)


class Mailbox:
    """A member's side."""

    def __init__(self, host: str, port: int, prefix: str, member: str, timeout_s: float) -> None:
        """Raises OSError, RuntimeError: nobody listens there."""
        self.host, self._address = host, (host, port, timeout_s)
        self._store: TCPStore = connect_store(host, port, timeout_s)
        self._prefix = prefix
        self._key = f"{prefix}/{member}"
        self._number = 0

    def next_order(self, deadline: Deadline | None = None) -> Message:
        """Wait for the next order.

        Raises:
            CoordinatorGone: there will be none.
            DeadlineExceeded
        """
        self._number += 1
        key = f"{self._key}/order/{self._number}"
        while True:
            wait_s = _LONGEST_S if deadline is None else deadline.remaining_s + 0.01
            try:
                self._store.wait([key], timedelta(seconds=wait_s))
                order: Message = json.loads(zlib.decompress(self._store.get(key)))
                self._store.delete_key(key)
                return order
            except DistStoreError:  # the wait was in vain
                if deadline is not None:
                    deadline.check()
            except RuntimeError as error:
                raise CoordinatorGone(str(error).split("\n", 1)[0]) from None

    def wake(self) -> None:
        """From another thread: the next order, or the one after it, is to end."""
        number = self._number
        with suppress(OSError, RuntimeError):  # then the coordinator is gone, and whoever waited knows
            store = connect_store(*self._address)
            for later in (number, number + 1):
                store.set(f"{self._key}/order/{later}", packed({"op": "end"}))  # type: ignore[arg-type]  # it takes bytes as well

    def report(self, report: Message) -> None:
        """Answer the last order. Raises CoordinatorGone."""
        try:
            self._store.set(f"{self._key}/report/{self._number}", json.dumps(report))
        except RuntimeError as error:
            raise CoordinatorGone(str(error).split("\n", 1)[0]) from None

    def namespace(self, name: str) -> PrefixStore:
        """Where members find each other; the same name gives the same one."""
        return PrefixStore(f"{self._prefix}/{name}", self._store)
