"""What the KV-aware router remembers of sessions and groups, in bounded memory. Pure.

Flows in: each request as it is sent. Flows out: where a session was last, how much of it is cached there, and how
the siblings of a group lie over the engines.

Invariant: never more than `sessions` sessions with `blocks` block keys together, nor more than `groups` groups; the
least recently used are forgotten. What is forgotten costs a prefill, nothing else.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from slimerl.rollout.kv_fleet import Seat

MAX_SESSIONS = 100_000
"""Ten times the sessions that one rollout process is built for."""
MAX_SESSION_BLOCKS = 1_000_000
"""Keys of 64 million tokens: 10,000 sessions of 6k tokens, in about 60 MB."""
MAX_GROUPS = 20_000
"""More groups than can be under way: a group matters while its siblings are started."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation. `keys`: its block keys, whatever the weights."""

    name: str
    group: str
    keys: list[int] = field(default_factory=list)
    seat: Seat | None = None
    """Where its last request went."""
    version: int = -1
    """Weights of its KV there."""
    held: int = 0
    """Its tokens that are cached there."""
    shared: int = 0
    """Of these, tokens that were there before it came: they weigh on the engine's KV once, not per session."""


@dataclass(slots=True, eq=False)
class Group:
    """Siblings: sessions that start from one prompt."""

    keys: list[int] = field(default_factory=list)
    """Of the prompt of the first sibling."""
    spread: Counter[Seat] = field(default_factory=Counter)
    """Sessions by seat."""
    promised: Counter[Seat] = field(default_factory=Counter)
    """Siblings still to come, by the seat that they are expected at."""


class Memory:
    """See the module's docstring."""

    def __init__(
        self, sessions: int = MAX_SESSIONS, blocks: int = MAX_SESSION_BLOCKS, groups: int = MAX_GROUPS
    ) -> None:
        self._bounds = (sessions, blocks, groups)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._blocks = 0

    def session(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def group(self, name: str) -> Group | None:
        return self._groups.get(name)

    def group_of(self, name: str) -> Group:
        """The group's record, made where there is none, and made the most recent one."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group()
            while len(self._groups) > self._bounds[2]:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(name)
        return group

    def sent(self, name: str, group: str, keys: list[int], seat: Seat) -> Session:
        """The session's record, made the most recent one; `keys` are those of the prompt that goes to `seat`."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(name, group)
        else:
            self._sessions.move_to_end(name)
        if len(keys) > self._bounds[1]:
            keys = []
        self._blocks += len(keys) - len(session.keys)
        session.keys = keys
        if group:
            self._lie(session, group, seat)
        session.seat = seat
        while len(self._sessions) > self._bounds[0] or self._blocks > self._bounds[1]:
            self._blocks -= len(self._sessions.popitem(last=False)[1].keys)
        return session

    def sizes(self) -> tuple[int, int, int]:
        """Sessions, block keys, groups."""
        return len(self._sessions), self._blocks, len(self._groups)

    def _lie(self, session: Session, name: str, seat: Seat) -> None:
        group = self.group_of(name)
        group.keys = group.keys or session.keys
        if session.seat is seat:
            return
        before = session.seat
        if before is not None and group.spread[before] > 0:
            group.spread[before] -= 1
            if not group.spread[before]:
                del group.spread[before]
        group.spread[seat] += 1
