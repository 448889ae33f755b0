"""Sessions as trees of turns, token by token. Pure: no clock, no I/O.

Flows in: what a client asked (digests of its conversation, tokens of the part that is new) and what an engine sampled.
Flows out: the tokens that a request goes on with, and branches: what becomes a training sample.

A turn is what was observed since the turn before it, and what was sampled then. A client that goes on where it was gets
a child of its last turn; one that edits what was said, or asks again, opens a branch beside it. Both are kept::

    session.match([a])             # nothing known: the whole conversation is new
    first = session.begin(None, observed=[1, 2], asked=a)
    session.complete(first, [3, 4], logprobs, versions, "stop")
    session.tell(first, b)
    session.match([a, b, c])       # `first`, and one message that is new
    second = session.begin(first, observed=[5], asked=c)
    second.context()               # [1, 2, 3, 4, 5]

Invariants: the tokens of a turn begin with those of its parent; sampled tokens stand in one turn alone, exactly as the
engine gave them; what was tokenised once for a place in the tree is used for all that is asked there again; a session
and a table of sessions are bounded, and what does not fit is refused or, where nobody uses it, forgotten and counted.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from slimerl.samples.written_ids import pack

MAX_TURNS = 2048
"""Of one session: many times what an agent takes, and a bound for one that asks the same for ever."""
MAX_SESSIONS = 20_000
"""Twice the sessions that one rollout process is built for."""
MAX_TOKENS = 64_000_000
"""Of all sessions, observed and sampled: a gigabyte at most."""


class SessionError(RuntimeError):
    """The session cannot take this request; `reason`: one word, for counting."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def _pack_versions(versions: Sequence[int]) -> "array[int]":
    """They are nearly always the same."""
    count = len(versions)
    if count and versions.count(versions[0]) == count:
        return array("i", (versions[0],)) * count
    return pack(versions)


def _digest(*flat: str | bytes | memoryview) -> bytes:
    """Of pieces of one text, or of one list of ids, one behind the other."""
    # ids are not the same digits as a text
    hashed = xxhash.xxh3_128(seed=0 if isinstance(flat[0], str) else 1)
    for piece in flat:
        hashed.update(piece.encode() if isinstance(piece, str) else piece)
    return hashed.digest()


class Turn(msgspec.Struct, eq=False):
    """`number`: in its session, in the order in which they were begun."""

    number: int
    parent: "Turn | None"
    observed: "array[int]"
    """Tokens that stand between the parent's and the sampled ones; for the first turn the prompt."""
    tokens: "array[int]" = msgspec.field(default_factory=array("i").__copy__)
    logprobs: "array[float]" = msgspec.field(default_factory=array("d").__copy__)
    versions: "array[int]" = msgspec.field(default_factory=array("i").__copy__)
    finish_reason: str = ""
    """Empty while it is under way."""
    length: int = 0
    """Tokens of the branch up to the end of this turn."""
    opening_length: int = 0
    """Tokens of the branch's prompt."""
    has_children: bool = False

    def path(self) -> "list[Turn]":
        """From the first turn to this one."""
        turns = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def packed(self) -> "array[int]":
        """All tokens of the branch up to the end of this turn."""
        found = array("i")
        for turn in self.path():
            found += turn.observed
            found += turn.tokens
        return found

    def context(self) -> list[int]:
        """The tokens that it was sampled from."""
        found: list[int] = []
        for turn in self.path():
            found.extend(turn.observed)
            if turn is not self:
                found.extend(turn.tokens)
        return found


@dataclass(slots=True)
class Session:
    """Of one client. `pinned`: somebody waits for its end, it is not forgotten."""

    session_id: str
    pinned: bool = False
    turns: list[Turn] = field(default_factory=list)
    """In the order in which they were completed."""
    under_way: int = 0
    tokens: int = 0
    """Kept, of all turns."""
    counted: int = 0
    """Of these, those that `Sessions` knows of."""
    _begun: int = 0
    _told: dict[bytes, Turn] = field(default_factory=dict)
    _asked: dict[bytes, Turn] = field(default_factory=dict)
    _told_flat: dict[int, dict[bytes, Turn]] = field(default_factory=dict)
    """Of completions: by the length of prompt and completion, then by digest."""

    @property
    def last(self) -> Turn | None:
        """The turn that was completed last."""
        return self.turns[-1] if self.turns else None

    def match(self, conversation: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The turn that a conversation goes on with, and how many of its messages that covers; (None, 0): none.

        Args:
            conversation: its digests, see `conversation.digests`.
        """
        for covered in range(len(conversation), 0, -1):
            turn = self._told.get(conversation[covered - 1])
            if turn is not None:
                return turn, covered
        return None, 0

    def match_flat(self, prompt: str | bytes) -> tuple[Turn | None, int]:
        """As `match`, for the prompt of a completion, as text or as `written_ids`: the longest that was told before,
        and its characters or bytes."""
        flat = prompt if isinstance(prompt, str) else memoryview(prompt)
        for length in sorted(self._told_flat, reverse=True):
            if length <= len(flat):
                turn = self._told_flat[length].get(_digest(flat[:length]))
                if turn is not None:
                    return turn, length
        return None, 0

    def observed_before(self, parent: Turn | None, asked: bytes) -> "array[int] | None":
        """Tokens of what is asked, if it was asked in this place before."""
        turn = self._asked.get(asked)
        return turn.observed if turn is not None and turn.parent is parent else None

    def begin(self, parent: Turn | None, observed: "array[int]", asked: bytes) -> Turn:
        """A turn under way; to be ended by `complete` or `abandon`.

        Raises:
            SessionError: the session has all the turns that it may have.
        """
        if self._begun >= MAX_TURNS:
            raise SessionError(f"session {self.session_id} has had {MAX_TURNS} turns; finish it", "too_many_turns")
        new = len(observed)
        before, opening = (parent.length, parent.opening_length) if parent is not None else (0, new)
        turn = Turn(self._begun, parent, observed, length=before + new, opening_length=opening)
        known = self._asked.setdefault(asked, turn)
        if known.parent is not parent:
            self._asked[asked] = turn
        self._begun += 1
        self.under_way += 1
        self.tokens += new
        return turn

    def complete(
        self,
        turn: Turn,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
    ) -> None:
        """Take what the engine sampled."""
        turn.tokens, turn.versions = pack(tokens), _pack_versions(versions)
        turn.logprobs = array("d")
        turn.logprobs.frombytes(struct.pack(f"{len(logprobs)}d", *logprobs))
        if not len(turn.tokens) == len(turn.logprobs) == len(turn.versions):
            raise ValueError(f"turn {turn.number}: as many tokens as logprobs and versions are needed")
        turn.finish_reason = finish_reason
        turn.length += len(turn.tokens)
        if turn.parent is not None:
            turn.parent.has_children = True
        self.turns.append(turn)
        self.under_way -= 1
        self.tokens += len(turn.tokens)

    def tell(self, turn: Turn, told: bytes) -> None:
        """A client has been told a reply, and may go on with it. `told`: digest of the conversation up to the reply; of
        two with the same the later one is gone on with."""
        self._told[told] = turn

    def tell_flat(self, turn: Turn, *told: str | bytes) -> None:
        """As `tell`, of a completion: `told` is its prompt with what was told behind it, in one piece or several."""
        self._told_flat.setdefault(sum(map(len, told)), {})[_digest(*told)] = turn

    def abandon(self, turn: Turn) -> None:
        """It came to nothing: the client went, or no engine answered. Nothing of it stays but its prompt's tokens,
        should it be asked again."""
        self.under_way -= 1

    def leaves(self) -> list[Turn]:
        """The ends of all branches, in the order in which they were completed."""
        return [turn for turn in self.turns if not turn.has_children]

    def branch(self, which: str) -> Turn | None:
        """The end of one branch. `which`: "longest": with the most tokens, of equals the later one; else that of the
        turn completed last."""
        if which == "longest":
            return max(self.leaves()[::-1], key=lambda turn: turn.length, default=None)
        return self.last


@dataclass
class Sessions:
    """All of a gateway, the least recently used first."""

    max_sessions: int = MAX_SESSIONS
    max_tokens: int = MAX_TOKENS
    forgotten: int = 0
    """Sessions that nobody had ended, and that had to make room."""
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _tokens: int = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        return self._tokens

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def use(self, session_id: str) -> Session:
        """The session, made where there is none.

        Raises:
            SessionError: there are too many that are in use.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
            return session
        if not self._make_room(self.max_sessions - 1):
            raise SessionError(f"all {self.max_sessions} sessions are in use; finish some", "too_many_sessions")
        session = self._sessions[session_id] = Session(session_id)
        return session

    def grown(self, session: Session) -> None:
        """A session has more tokens than before; others make room for them."""
        if self._sessions.get(session.session_id) is session:
            self._tokens += session.tokens - session.counted
            session.counted = session.tokens
            if self.is_full():
                self._make_room(self.max_sessions)

    def close(self, session_id: str) -> Session | None:
        """Take a session out."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._tokens -= session.counted
        return session

    def is_full(self) -> bool:
        """Do sessions that are in use have all the tokens that there may be?"""
        return self._tokens > self.max_tokens

    def _make_room(self, sessions: int) -> bool:
        """Forget idle sessions, the least recently used first, until the rest fits."""
        idle = []
        count, tokens = len(self._sessions), self._tokens
        # not a copy of the table: of thousands of sessions the first few make room
        for session_id, session in self._sessions.items():
            if count <= sessions and tokens <= self.max_tokens:
                break
            if not session.pinned and not session.under_way:
                idle.append(session_id)
                count -= 1
                tokens -= session.counted
        for session_id in idle:
            self.close(session_id)
        self.forgotten += len(idle)
        return count <= sessions
