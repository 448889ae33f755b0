"""What the sample store tells of its samples: counts, leased batches, groups, and its errors."""

from dataclasses import dataclass
from enum import StrEnum

from slimerl.samples.messages import SampleMeta
from slimerl.samples.sample import Sample

GROUP_TOO_SMALL = "group_too_small"
"""Reason of the samples that are dropped because too few of their group are left."""


class StoreError(RuntimeError):
    """A transition that the life cycle forbids, or an id that the store does not hold; the message names the id."""


class ConservationError(StoreError):
    """The books do not balance: a bug of the store, never of its caller."""


class GroupState(StrEnum):
    OPEN = "open"
    """Some sample of the group is not settled yet."""
    READY = "ready"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Counts:
    """Samples by what became of them; admitted = running + buffered + trained + sum(dropped)."""

    admitted: int
    running: int
    buffered: int
    trained: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class Batch:
    """Whole groups, leased to the trainer; `samples` in admission order."""

    batch_id: str
    group_ids: tuple[str, ...]
    samples: tuple[SampleMeta, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the choice of a batch needs to know of a group; `version`: policy version at its admission."""

    group_id: str
    version: int
    ready: bool


@dataclass(slots=True)
class Group:
    """As the store keeps it while it is live."""

    group_id: str
    version: int
    """Policy version at admission: what bounds the group's staleness."""
    samples: dict[str, Sample | SampleMeta]
    """Those not dropped; of finished ones the metadata."""
    number: int
    """Rises in admission order."""
    state: GroupState = GroupState.OPEN
    batch_id: str | None = None


def name_of_batch(step: int) -> str:
    """Of the batch of a step."""
    return f"step-{step}"


def step_of_batch(batch_id: str) -> int:
    """The way back from `name_of_batch`."""
    return int(batch_id.removeprefix("step-"))
