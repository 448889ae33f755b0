"""The sample store: every sample from admission to its one terminal state. Pure: no clock, no I/O.

Flows in: groups of samples (the answers to one prompt) as they are admitted, and what happened to each sample.
Flows out: batches of whole groups in admission order, leased to the trainer until it acknowledges them.

Invariant, checked at every transition (in samples)::

    admitted = trained + buffered + running + dropped(by reason)

where *buffered* is READY (leased or not) and *running* is everything admitted that is not yet ready. A group is
settled once each of its samples is rewarded or dropped: it becomes ready as a whole with what is left of it, or, if
too little is left, is dropped as a whole. Example::

    store = SampleStore(smallest_group=2)
    store.admit("g", "prompt-7", [a, b], version=0)
    for sample in (a, b):
        store.start(sample.sample_id), store.generated(sample.sample_id), store.rewarded(sample.sample_id)
    batch = store.lease("step-0", ["g"])   # metadata of a and b
    store.payloads(["a", "b"])             # their tokens
    store.trained("step-0")                # both are forgotten, and counted
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slimerl.samples.messages import SampleMeta, SamplePayload, SavedGroup
from slimerl.samples.sample import FORK, NEXT_STATES, SETTLED_STATES, Sample, SampleState

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
class _Group:
    group_id: str
    version: int
    """Policy version at admission: what bounds the group's staleness."""
    samples: dict[str, Sample]
    """Those not dropped."""
    state: GroupState = GroupState.OPEN
    batch_id: str | None = None


@dataclass
class SampleStore:
    """See the module's docstring. `smallest_group`: samples that a group needs to be of use."""

    smallest_group: int = 1
    _groups: dict[str, _Group] = field(default_factory=dict)
    """Live groups in admission order."""
    _group_of: dict[str, _Group] = field(default_factory=dict)
    _states: dict[str, SampleState] = field(default_factory=dict)
    """Of live samples; a sample that reached a terminal state is not in here."""
    _by_state: Counter[SampleState] = field(default_factory=Counter)
    _batches: dict[str, Batch] = field(default_factory=dict)
    _acknowledged: set[str] = field(default_factory=set)
    _admitted: int = 0
    _trained: int = 0
    _dropped: Counter[str] = field(default_factory=Counter)

    def admit(self, group_id: str, samples: Sequence[Sample], version: int) -> None:
        """Take a group in, QUEUED, admitted under policy `version`.

        Raises:
            StoreError: no samples, a sample of another group, or an id that is live already.
        """
        if not samples:
            raise StoreError(f"group {group_id}: a group needs at least one sample")
        if group_id in self._groups:
            raise StoreError(f"group {group_id} is live already; ids must be unique")
        ids = [sample.sample_id for sample in samples]
        for sample in samples:
            if sample.group_id != group_id:
                raise StoreError(f"sample {sample.sample_id} belongs to group {sample.group_id}, not to {group_id}")
            if sample.sample_id in self._states or ids.count(sample.sample_id) > 1:
                raise StoreError(f"sample {sample.sample_id} is live already; ids must be unique")
        self._enter(self._groups.setdefault(group_id, _Group(group_id, version, {})), samples)

    def join(self, sample: Sample) -> None:
        """One more sample of a group that is open, QUEUED. Raises StoreError: it is not, or the id is live already."""
        group = self._groups.get(sample.group_id)
        if group is None or group.state is not GroupState.OPEN or sample.sample_id in self._states:
            raise StoreError(f"sample {sample.sample_id} cannot join: it is live, or {sample.group_id} is not open")
        self._enter(group, [sample])

    def forks(self, sample_id: str) -> list[str]:
        """Of a live sample: ids of those that it has forked (`Policy.fork`), and these have."""
        return [one for one in self._live(sample_id).samples if one.startswith(sample_id + FORK)]

    def start(self, sample_id: str) -> None:
        """QUEUED or INTERRUPTED → RUNNING."""
        self._move(sample_id, SampleState.RUNNING)
        self.check()

    def interrupt(self, sample_id: str) -> None:
        """RUNNING → INTERRUPTED: it keeps its tokens and goes on later."""
        self._move(sample_id, SampleState.INTERRUPTED)
        self.check()

    def generated(self, sample_id: str) -> None:
        """RUNNING → GENERATED. Raises StoreError if the sample holds no response tokens."""
        if not self.sample(sample_id).response_tokens:
            raise StoreError(f"sample {sample_id}: generated, but it holds no response tokens")
        self._move(sample_id, SampleState.GENERATED)
        self.check()

    def rewarded(self, sample_id: str) -> GroupState:
        """GENERATED → REWARDED; returns what that made of its group. Raises StoreError without a reward."""
        if self.sample(sample_id).reward is None:
            raise StoreError(f"sample {sample_id}: rewarded, but its reward is not set")
        self._move(sample_id, SampleState.REWARDED)
        return self._settle(self._group_of[sample_id])

    def drop(self, sample_id: str, reason: str) -> GroupState:
        """Any live state → DROPPED; returns what that made of its group.

        Raises:
            StoreError: its group is leased to the trainer (give the batch back first).
        """
        group = self._live(sample_id)
        if group.batch_id is not None:
            raise StoreError(f"sample {sample_id} is leased in batch {group.batch_id} and cannot be dropped")
        self._end(sample_id, SampleState.DROPPED)
        self._dropped[reason] += 1
        del group.samples[sample_id]
        return self._settle(group)

    def verdicts(self, group_id: str) -> list[bool | None]:
        """Whether each answer of a live group is right."""
        return [sample.correct for sample in self._groups[group_id].samples.values()]

    def drop_group(self, group_id: str, reason: str) -> None:
        """READY → DROPPED for a whole group. Raises StoreError: it is not ready, or leased to the trainer."""
        group = self._groups.get(group_id)
        if group is None or group.state is not GroupState.READY or group.batch_id is not None:
            raise StoreError(f"group {group_id} cannot be dropped as a whole: it is not ready, or leased")
        for sample_id in group.samples:
            self._end(sample_id, SampleState.DROPPED)
        self._dropped[reason] += len(group.samples)
        del self._groups[group_id]
        self.check()

    def unleased(self) -> list[GroupView]:
        """Groups that no batch holds, in admission order."""
        return [
            GroupView(group.group_id, group.version, group.state is GroupState.READY)
            for group in self._groups.values()
            if group.batch_id is None
        ]

    def lease(self, batch_id: str, group_ids: Sequence[str]) -> Batch:
        """Lease ready groups as a batch, its samples in admission order.

        Raises:
            StoreError: the batch was leased or trained already, or a group is not ready or in another batch.
        """
        if batch_id in self._batches or batch_id in self._acknowledged:
            raise StoreError(f"batch {batch_id} was leased already")
        wanted = set(group_ids)
        groups = [group for group_id, group in self._groups.items() if group_id in wanted]
        if len(groups) < len(group_ids):
            missing = wanted - {group.group_id for group in groups}
            raise StoreError(f"batch {batch_id}: groups not in the store, or named twice: {sorted(missing)}")
        for group in groups:
            if group.state is not GroupState.READY or group.batch_id is not None:
                held = f", leased in batch {group.batch_id}" if group.batch_id else ""
                raise StoreError(f"batch {batch_id}: group {group.group_id} is {group.state}{held}")
        for group in groups:
            group.batch_id = batch_id
        metas = tuple(sample.meta() for group in groups for sample in group.samples.values())
        batch = Batch(batch_id, tuple(group.group_id for group in groups), metas)
        self._batches[batch_id] = batch
        self.check()
        return batch

    def batch(self, batch_id: str) -> Batch | None:
        """A leased batch; None when it was never leased, or given back.

        Raises:
            StoreError: it was trained already.
        """
        if batch_id in self._acknowledged:
            raise StoreError(f"batch {batch_id} was trained already")
        return self._batches.get(batch_id)

    def give_back(self, batch_id: str) -> None:
        """End a lease without training: its groups are ready again, at their old place in the order."""
        batch = self._leased(batch_id)
        for group_id in batch.group_ids:
            self._groups[group_id].batch_id = None
        del self._batches[batch_id]
        self.check()

    def trained(self, batch_id: str) -> None:
        """READY → TRAINED for a whole leased batch; a repeated acknowledgment changes nothing."""
        if batch_id in self._acknowledged:
            return
        batch = self._leased(batch_id)
        for meta in batch.samples:
            self._end(meta.sample_id, SampleState.TRAINED)
        for group_id in batch.group_ids:
            del self._groups[group_id]
        self._trained += len(batch.samples)
        del self._batches[batch_id]
        self._acknowledged.add(batch_id)
        self.check()

    def saved_groups(self) -> list[SavedGroup]:
        """Every live group for a checkpoint, in admission order, with what its samples have.

        Raises:
            StoreError: a batch is leased: whether it will have been trained is not known.
        """
        if self._batches:
            raise StoreError(f"batch {', '.join(self._batches)} is leased; save after it was trained")
        return [
            SavedGroup(
                group.group_id,
                group.version,
                list(group.samples),
                [one.saved() for sample_id, one in group.samples.items() if self._states[sample_id] in SETTLED_STATES],
                [
                    one.saved()
                    for sample_id, one in group.samples.items()
                    if self._states[sample_id] not in SETTLED_STATES and one.response_tokens
                ],
            )
            for group in self._groups.values()
        ]

    def restore(self, trained: int, dropped: Mapping[str, int], batch_ids: Iterable[str]) -> None:
        """Take over the books of an earlier process; its live groups are admitted afterwards.

        Raises:
            StoreError: there are samples in this store already.
        """
        if self._admitted:
            raise StoreError(f"{self._admitted} samples were admitted already; books are taken over before the first")
        self._admitted = trained + sum(dropped.values())
        self._trained = trained
        self._dropped = Counter(dropped)
        self._acknowledged = set(batch_ids)
        self.check()

    def admit_saved(self, saved: SavedGroup, missing: Sequence[Sample]) -> GroupState:
        """Take a group of an earlier process in; returns READY if nothing of it is missing.

        Args:
            missing: those named by `saved.missing`, with what they have; they are QUEUED, the finished ones rewarded.

        Raises:
            StoreError: as `admit`, or `missing` are not the samples that are missing.
        """
        if [sample.sample_id for sample in missing] != saved.missing:
            raise StoreError(f"group {saved.group_id}: to be made again are {saved.missing}, and no others")
        finished = [Sample.restored(each, saved.group_id) for each in saved.samples]
        by_id = {sample.sample_id: sample for sample in (*finished, *missing)}
        self.admit(saved.group_id, [by_id[sample_id] for sample_id in saved.sample_ids], saved.version)
        for sample in finished:
            self.start(sample.sample_id)
            self.generated(sample.sample_id)
            self.rewarded(sample.sample_id)
        return self._groups[saved.group_id].state

    def sample(self, sample_id: str) -> Sample:
        """A live sample. Raises StoreError."""
        return self._live(sample_id).samples[sample_id]

    def state(self, sample_id: str) -> SampleState:
        """Of a live sample. Raises StoreError."""
        self._live(sample_id)
        return self._states[sample_id]

    def in_state(self, state: SampleState) -> int:
        """How many live samples are in a state."""
        return self._by_state[state]

    def payloads(self, sample_ids: Iterable[str]) -> list[SamplePayload]:
        """Tokens of ready samples, in the order asked for. Raises StoreError naming every id that is not ready."""
        ids = list(sample_ids)
        missing = [one for one in ids if self._states.get(one) is not SampleState.READY]
        if missing:
            raise StoreError(f"not in the store as ready samples: {', '.join(missing)}")
        return [self.sample(one).payload() for one in ids]

    def open_groups(self) -> list[str]:
        """Ids of the groups that are not settled, oldest first."""
        return [group.group_id for group in self._groups.values() if group.state is GroupState.OPEN]

    def counts(self) -> Counts:
        buffered = self._by_state[SampleState.READY]
        running = sum(self._by_state.values()) - buffered
        return Counts(self._admitted, running, buffered, self._trained, dict(self._dropped))

    def check(self) -> None:
        """Raises ConservationError when the books do not balance."""
        counts = self.counts()
        ended = counts.trained + sum(counts.dropped.values())
        if counts.admitted != counts.running + counts.buffered + ended or len(self._states) != counts.admitted - ended:
            raise ConservationError(f"samples were lost or counted twice: {counts}, live {len(self._states)}")

    def _settle(self, group: _Group) -> GroupState:
        """Close the group if nothing of it is pending any more."""
        small = len(group.samples) < self.smallest_group
        if small:
            for sample_id in list(group.samples):
                if self._states[sample_id] in SETTLED_STATES:
                    self._end(sample_id, SampleState.DROPPED)
                    self._dropped[GROUP_TOO_SMALL] += 1
                    del group.samples[sample_id]
            if not group.samples:
                group.state = GroupState.DROPPED
                del self._groups[group.group_id]
        elif group.state is GroupState.OPEN and all(self._states[one] in SETTLED_STATES for one in group.samples):
            for sample_id in group.samples:
                self._move(sample_id, SampleState.READY)
            group.state = GroupState.READY
        self.check()
        return group.state

    def _enter(self, group: _Group, samples: Sequence[Sample]) -> None:
        for sample in samples:
            group.samples[sample.sample_id] = sample
            self._group_of[sample.sample_id], self._states[sample.sample_id] = group, SampleState.QUEUED
            self._by_state[SampleState.QUEUED] += 1
            self._admitted += 1
        self.check()

    def _leased(self, batch_id: str) -> Batch:
        if batch_id not in self._batches:
            raise StoreError(f"batch {batch_id} is not leased; leased: {', '.join(self._batches) or 'none'}")
        return self._batches[batch_id]

    def _live(self, sample_id: str) -> _Group:
        group = self._group_of.get(sample_id)
        if group is None:
            raise StoreError(f"sample {sample_id} is not live: it was never admitted, or was trained or dropped")
        return group

    def _move(self, sample_id: str, to: SampleState) -> None:
        self._live(sample_id)
        state = self._states[sample_id]
        if to not in NEXT_STATES[state]:
            raise StoreError(f"sample {sample_id} is {state} and cannot become {to}")
        self._states[sample_id] = to
        self._by_state[state] -= 1
        self._by_state[to] += 1

    def _end(self, sample_id: str, to: SampleState) -> None:
        """Into a terminal state, and out of the books of the living."""
        self._move(sample_id, to)
        self._by_state[to] -= 1
        del self._states[sample_id]
        del self._group_of[sample_id]
