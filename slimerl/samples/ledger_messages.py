"""The wire between rollout processes: what a shard tells the admission ledger, what the ledger tells it, evaluations.

Flows in both ways a numbered stream: a shard's events, the ledger's orders. Whoever speaks says all that the other has
not acknowledged yet; whoever hears passes over the numbers that it knows. So a message may be lost, repeated or
overtaken by a later one. Numbers begin with 1 in each incarnation of a shard.

A group goes by its position in the sequence of prompts (`slimerl/rollout/prompts.py`), from which its ids and seeds
follow: whichever shard makes it, it is the same group.
"""

import msgspec

from slimerl.samples.messages import SampleMeta


class Settled(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """Each sample of a group has its reward or was dropped. `samples`: those that are left, none where the group came
    to nothing; `dropped`: how many of the others, by reason."""

    position: int
    samples: list[SampleMeta]
    dropped: dict[str, int] = {}
    notes: bytes = b""
    """What the shard has noted of it, for the figures of its batch."""


class Returned(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """The shard has nothing of the group any more: it is to be made elsewhere."""

    position: int


Event = Settled | Returned


class Make(msgspec.Struct, frozen=True, tag="m", array_like=True):
    """Make the samples of a group, by weights that are no older than `version`."""

    position: int
    version: int


class LetGo(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """Groups of the batch of `step`, which has been trained: nothing of them is needed any more."""

    step: int
    positions: list[int]


class Void(msgspec.Struct, frozen=True, tag="v", array_like=True):
    """Forget a group, however far it is: its end is in the books, or it is made elsewhere."""

    position: int


Order = Make | LetGo | Void


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A group that a shard has. `version`: of the order to make it; `settled`: None while it is under way."""

    position: int
    version: int
    settled: Settled | None = None


class ShardJoin(msgspec.Struct, frozen=True):
    """A shard that has started, or whose lease ran out, and what it holds. `incarnation` rises with each."""

    shard: int
    incarnation: int
    held: list[Held] = []


NO_ENGINE = -(2**30)
"""Instead of room: no engine is left that could make anything, also not what the trainer waits for."""


class ShardReport(msgspec.Struct, frozen=True):
    """Also what renews a shard's lease. `seen`: number of the last order that it knows."""

    shard: int
    incarnation: int
    seen: int
    room: int
    """Groups that it would take beside those of the orders it has seen, or `NO_ENGINE`."""
    first: int = 1
    """Number of the first of the events."""
    events: list[Event] = []
    wait_s: float = 0.0
    """The reply may take so long where there is nothing to order."""
    stopped: str = ""
    """Why nothing more will come of this shard."""
    unsynced: list[str] = []
    """Engines of the shard that have registered since the last sync."""
    serving: int = 0
    """How many of its engines do."""


class NotHeard(msgspec.Struct, frozen=True, tag=True):
    """Instead of a reply: incarnation `given` is not heard any more. The shard is to join with a higher number than
    `incarnation`."""

    given: int
    incarnation: int


class LedgerReply(msgspec.Struct, frozen=True, tag=True):
    """`heard`: number of the last event that is in the books."""

    incarnation: int
    heard: int
    lease_s: float
    """All that the shard holds becomes another's, once nothing was heard of it for so long."""
    first: int = 1
    """Number of the first of the orders."""
    orders: list[Order] = []


class EvaluatePart(msgspec.Struct, frozen=True):
    """Answer every `parts`-th held-out prompt of each set, from `part` on."""

    step: int
    timeout_s: float
    part: int
    parts: int


class EvaluatedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`said`: what a response gives as its answer, None: nothing; `failure`: why it is not judged, or empty."""

    correct: bool
    said: str | None
    tokens: int
    failure: str = ""


class EvaluatedPart(msgspec.Struct, frozen=True):
    """By `version`. `answers`: of each set, of each of its prompts in the part."""

    version: int
    answers: list[list[list[EvaluatedAnswer]]]
