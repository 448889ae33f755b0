"""`shards`: the coordinator's side of a transfer in which every engine rank takes its own slices from several senders.

Flows in: orders for members (trainer ranks, engine ranks). Flows out: their reports. Invariants: an order is answered
or its member is named as silent when the deadline is over; the store and its secret last as long as the coordinator,
so that receivers in the engines know when it is gone.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore

from slimerl.engine.inside.mailbox import packed
from slimerl.engine.inside.store import connect_store
from slimerl.resharding.transports.message import ReportDesk
from slimerl.resilience.deadline import Deadline

Message = dict[str, Any]

POLL_S, POLL_PER_MEMBER_S = 0.01, 2e-5
"""At most; it is looked more often at first, so that a short transfer is not waited for much longer than it takes."""
FIRST_POLL_S, POLL_SHARE = 0.001, 0.05
"""And then by this share of the time that has been waited for already."""
_LOOK_S = 0.5
"""How often each member is looked at apart. (A wait on the store that is in vain would be a warning in the log.)"""

PATIENCE_S = 2.0
"""Without an answer, or as soon as somebody has seen a link break, it is asked who is gone; then again as often."""

Gone = Callable[[Sequence[str]], Mapping[str, str]]
"""Of members that have not answered: those that never will, and why."""


class Station:
    """Hosts the store; sends orders and collects reports. `close` it: receivers in the engines end then."""

    def __init__(self, timeout_s: float, hosts: Mapping[str, str]) -> None:
        """`hosts`: of all members, by any name; where one is another machine, the store listens to the network."""
        self.desk = ReportDesk(timeout_s, hosts)
        self.prefix = secrets.token_hex(16)
        self.timeout_s = timeout_s
        self._store: TCPStore | None = connect_store(self.desk.host, self.desk.port, timeout_s)
        self._numbers: Counter[str] = Counter()
        self._opened: Counter[str] = Counter()

    @property
    def address(self) -> Message:
        """For `Mailbox`."""
        return {"host": self.desk.host, "port": self.desk.port, "prefix": self.prefix, "timeout_s": self.timeout_s}

    def reopen(self, engine_id: str) -> str:
        """The name of the receiver that is to start in this engine: a new one, whatever an earlier one left behind."""
        self._opened[engine_id] += 1
        return self.receiver(engine_id)

    def receiver(self, engine_id: str) -> str:
        return f"{engine_id}.{self._opened[engine_id]}"

    def order(self, member: str, message: Message | bytes) -> None:
        """The member's next order, or one that has been `packed`; a report of an earlier one is lost."""
        self._numbers[member] += 1
        data = packed(message) if isinstance(message, dict) else message
        self._open_store.set(self._key(member, "order"), data)  # type: ignore[arg-type]  # it takes bytes as well

    def collect(
        self, members: Iterable[str], deadline: Deadline, gone: Gone = lambda _members: {}
    ) -> dict[str, Message]:
        """The reports on the last orders of these members, without those that stay silent until the deadline.

        `gone` is asked where others do not answer.
        """
        found: dict[str, Message] = {}
        waiting = {member: self._key(member, "report") for member in members}
        begun = looked = asked = time.monotonic()
        while waiting:
            last = deadline.remaining_s <= 0
            if self._open_store.check(list(waiting.values())):
                there = list(waiting)
            elif last or time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                there = [member for member, key in waiting.items() if self._open_store.check([key])]
            else:
                waited_s = time.monotonic() - begun
                time.sleep(min(POLL_S, FIRST_POLL_S + POLL_SHARE * waited_s) + POLL_PER_MEMBER_S * len(waiting))
                continue
            for member in there:
                key = waiting.pop(member)
                found[member] = json.loads(self._open_store.get(key))
                self._open_store.delete_key(key)
            if last:
                break
            broken = any("broken" in report for report in found.values())
            first = asked == begun and broken
            if waiting and (first or time.monotonic() - asked >= PATIENCE_S):
                asked = time.monotonic()
                for member, reason in gone(list(waiting)).items():
                    found[member] = {"ok": False, "error": reason}
                    del waiting[member]
        return found

    def close(self) -> None:
        self._store = None
        self.desk.close()

    def _key(self, member: str, what: str) -> str:
        return f"{self.prefix}/{member}/{what}/{self._numbers[member]}"

    @property
    def _open_store(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError("the coordinator's store is closed")
        return self._store
