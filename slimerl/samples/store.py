"""The sample store: every sample from admission to its one terminal state. Pure: no clock, no I/O.

Flows in: groups of samples (the answers to one prompt) as they are admitted, and what happened to each sample.
Flows out: batches of whole groups in admission order, leased to the trainer until it acknowledges them; to the journal,
every transition that a process which takes over must know of.

Metadata stand apart from payload: once a sample has its reward, nothing is left of it but its `SampleMeta` and its
packed arrays, which only `payloads` looks at.

Invariant, checked at every transition (in samples)::

    admitted = trained + buffered + running + dropped(by reason)

where *buffered* is READY (leased or not) and *running* is everything admitted that is not yet ready. A group is
settled once each of its samples is rewarded or dropped: it becomes ready as a whole with what is left of it, or, if
too little is left, is dropped as a whole. Example::

    store.admit("g", [a, b], version=0)
    for one in ("a", "b"):
        store.start(one), store.generated(one), store.rewarded(one)
    store.lease("step-1", ["g"])   # metadata of a and b
    store.payloads(["a", "b"])     # their tokens
    store.trained("step-1")        # both are forgotten, and counted
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slimerl.samples import journal
from slimerl.samples.books import (
    GROUP_TOO_SMALL,
    Batch,
    ConservationError,
    Counts,
    Group,
    GroupState,
    GroupView,
    StoreError,
)
from slimerl.samples.messages import SampleMeta, SamplePayload, SavedGroup
from slimerl.samples.sample import FORK, NEXT_STATES, SETTLED_STATES, Sample, SampleState
from slimerl.samples.shelf import PayloadShelf


@dataclass
class SampleStore:
    """See the module's docstring. `smallest_group`: samples that a group needs to be of use."""

    smallest_group: int = 1
    note: Callable[[journal.Record], None] = journal.unheard
    """Takes every record of the journal, before anybody learns of what it says."""
    shelf: PayloadShelf = field(default_factory=PayloadShelf)
    ready: set[str] = field(default_factory=set)
    """Groups that are ready and in no batch."""
    _groups: dict[str, Group] = field(default_factory=dict)
    """Live groups in admission order."""
    _group_of: dict[str, Group] = field(default_factory=dict)
    _states: dict[str, SampleState] = field(default_factory=dict)
    """Of live samples; a sample that reached a terminal state is not in here."""
    _by_state: Counter[SampleState] = field(default_factory=Counter)
    _batches: dict[str, Batch] = field(default_factory=dict)
    _acknowledged: set[str] = field(default_factory=set)
    _admitted: int = 0
    _trained: int = 0
    _dropped: Counter[str] = field(default_factory=Counter)

    def admit(self, group_id: str, samples: Sequence[Sample], version: int, drawn: bool = True) -> None:
        """Take a group in, QUEUED, admitted under policy `version`; `drawn`: its prompt has just been.

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
        self.note(journal.Admitted(group_id, version, ids, drawn))
        self._groups[group_id] = group = Group(group_id, version, {}, number=self._admitted)
        self._enter(group, samples)

    def join(self, sample: Sample) -> None:
        """One more sample of a group that is open, QUEUED. Raises StoreError: it is not, or the id is live already."""
        group = self._groups.get(sample.group_id)
        if group is None or group.state is not GroupState.OPEN or sample.sample_id in self._states:
            raise StoreError(f"sample {sample.sample_id} cannot join: it is live, or {sample.group_id} is not open")
        self.note(journal.Joined(sample.group_id, sample.sample_id))
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
        self._keep_begun(self.sample(sample_id))
        self.check()

    def generated(self, sample_id: str) -> None:
        """RUNNING → GENERATED. Raises StoreError if the sample holds no token that the policy sampled."""
        if not any(self.sample(sample_id).sampled):
            raise StoreError(f"sample {sample_id}: generated, but it holds no response tokens of the policy")
        self._move(sample_id, SampleState.GENERATED)
        self.check()

    def rewarded(self, sample_id: str) -> GroupState:
        """GENERATED → REWARDED; returns what that made of its group. Raises StoreError without a reward."""
        sample, group = self.sample(sample_id), self._group_of[sample_id]
        if sample.reward is None:
            raise StoreError(f"sample {sample_id}: rewarded, but its reward is not set")
        self._move(sample_id, SampleState.REWARDED)
        group.samples[sample_id] = sample.meta()
        self.note(journal.Finished(group.group_id, self.shelf.put(sample)))
        return self._settle(group)

    def drop(self, sample_id: str, reason: str) -> GroupState:
        """Any live state → DROPPED; returns what that made of its group.

        Raises:
            StoreError: its group is leased to the trainer (give the batch back first).
        """
        group = self._live(sample_id)
        if group.batch_id is not None:
            raise StoreError(f"sample {sample_id} is leased in batch {group.batch_id} and cannot be dropped")
        self._drop(group, sample_id, reason)
        return self._settle(group)

    def ready_samples(self, group_id: str) -> list[SampleMeta]:
        """Those of a group that is ready and in no batch; of any other none."""
        samples = self._groups[group_id].samples.values() if group_id in self.ready else ()
        return [each for each in samples if isinstance(each, SampleMeta)]

    def drop_group(self, group_id: str, reason: str) -> None:
        """READY → DROPPED for a whole group. Raises StoreError: it is not ready, or leased to the trainer."""
        group = self._groups.get(group_id)
        if group is None or group.state is not GroupState.READY or group.batch_id is not None:
            raise StoreError(f"group {group_id} cannot be dropped as a whole: it is not ready, or leased")
        for sample_id in list(group.samples):
            self._drop(group, sample_id, reason)
        self._remove(group_id)
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
        wanted = dict.fromkeys(group_ids)
        missing = sorted(group_id for group_id in wanted if group_id not in self._groups)
        if missing or len(wanted) < len(group_ids):
            raise StoreError(f"batch {batch_id}: groups not in the store, or named twice: {missing}")
        groups = sorted((self._groups[group_id] for group_id in wanted), key=lambda group: group.number)
        for group in groups:
            if group.state is not GroupState.READY or group.batch_id is not None:
                held = f", leased in batch {group.batch_id}" if group.batch_id else ""
                raise StoreError(f"batch {batch_id}: group {group.group_id} is {group.state}{held}")
        for group in groups:
            group.batch_id = batch_id
            self.ready.discard(group.group_id)
        metas = tuple(meta for group in groups for meta in group.samples.values() if isinstance(meta, SampleMeta))
        batch = Batch(batch_id, tuple(group.group_id for group in groups), metas)
        self.note(journal.Leased(batch_id, list(batch.group_ids)))
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
        self.note(journal.GivenBack(batch_id))
        for group_id in batch.group_ids:
            self._groups[group_id].batch_id = None
            self.ready.add(group_id)
        del self._batches[batch_id]
        self.check()

    def trained(self, batch_id: str) -> None:
        """READY → TRAINED for a whole leased batch; a repeated acknowledgment changes nothing."""
        if batch_id in self._acknowledged:
            return
        batch = self._leased(batch_id)
        self.note(journal.Trained(batch_id))
        for meta in batch.samples:
            self._end(meta.sample_id, SampleState.TRAINED)
        for group_id in batch.group_ids:
            self._remove(group_id)
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
                self.shelf.finished(group.samples),
                [one.saved() for one in group.samples.values() if isinstance(one, Sample) and one.response_tokens],
            )
            for group in self._groups.values()
        ]

    def booked_groups(self) -> list[journal.BookedGroup]:
        """Every live group without its payload, in admission order, leased or not."""
        return [
            journal.BookedGroup(one.group_id, one.version, list(one.samples), self.shelf.journaled(one.samples))
            for one in self._groups.values()
        ]

    def leases(self) -> list[journal.Leased]:
        """Batches that are neither trained nor given back."""
        return [journal.Leased(batch.batch_id, list(batch.group_ids)) for batch in self._batches.values()]

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
        """Take a group of an earlier process in; returns READY if nothing of it is missing, DROPPED if that process
        ended while it dropped a group of which too few samples were left.

        Args:
            missing: those named by `saved.missing`, with what they have; they are QUEUED, the finished ones rewarded.

        Raises:
            StoreError: as `admit`, or `missing` are not the samples that are missing.
        """
        if [sample.sample_id for sample in missing] != saved.missing:
            raise StoreError(f"group {saved.group_id}: to be made again are {saved.missing}, and no others")
        finished = [Sample.restored(each, saved.group_id) for each in saved.samples]
        by_id = {sample.sample_id: sample for sample in (*finished, *missing)}
        self.admit(saved.group_id, [by_id[sample_id] for sample_id in saved.sample_ids], saved.version, drawn=False)
        group = self._groups[saved.group_id]
        for sample in missing:
            self._keep_begun(sample)
        for sample in finished:
            self.start(sample.sample_id)
            self.generated(sample.sample_id)
            self.rewarded(sample.sample_id)
        return group.state

    def sample(self, sample_id: str) -> Sample:
        """A live sample that is not finished. Raises StoreError."""
        sample = self._live(sample_id).samples[sample_id]
        if not isinstance(sample, Sample):
            raise StoreError(f"sample {sample_id} is finished; ask for its payload")
        return sample

    def state(self, sample_id: str) -> SampleState:
        """Of a live sample. Raises StoreError."""
        self._live(sample_id)
        return self._states[sample_id]

    def in_state(self, state: SampleState) -> int:
        """How many live samples are in a state."""
        return self._by_state[state]

    def payloads(self, sample_ids: Iterable[str], at_most_bytes: float = math.inf) -> list[SamplePayload]:
        """Of ready samples, in the order asked for: the first, and those behind it that fit. Raises StoreError naming
        every id that is not ready."""
        ids = list(sample_ids)
        if missing := [one for one in ids if self._states.get(one) is not SampleState.READY]:
            raise StoreError(f"not in the store as ready samples: {', '.join(missing)}")
        return self.shelf.payloads(ids, at_most_bytes)

    def open_groups(self) -> list[str]:
        """Those not settled, oldest first."""
        return [group.group_id for group in self._groups.values() if group.state is GroupState.OPEN]

    def counts(self) -> Counts:
        buffered = self._by_state[SampleState.READY]
        running = sum(self._by_state.values()) - buffered
        return Counts(self._admitted, running, buffered, self._trained, dict(self._dropped))

    def check(self) -> None:
        """Raises ConservationError when the books do not balance."""
        live = self._admitted - self._trained - sum(self._dropped.values())
        if sum(self._by_state.values()) != live or len(self._states) != live:
            raise ConservationError(f"samples were lost or counted twice: {self.counts()}, live {len(self._states)}")

    def _settle(self, group: Group) -> GroupState:
        """Close the group if nothing of it is pending any more."""
        if len(group.samples) < self.smallest_group:
            for sample_id in list(group.samples):
                if self._states[sample_id] in SETTLED_STATES:
                    self._drop(group, sample_id, GROUP_TOO_SMALL)
            if not group.samples:
                group.state = GroupState.DROPPED
                self._remove(group.group_id)
        elif group.state is GroupState.OPEN and all(self._states[one] in SETTLED_STATES for one in group.samples):
            for sample_id in group.samples:
                self._move(sample_id, SampleState.READY)
            group.state = GroupState.READY
            self.ready.add(group.group_id)
        self.check()
        return group.state

    def _enter(self, group: Group, samples: Sequence[Sample]) -> None:
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

    def _live(self, sample_id: str) -> Group:
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
        self.shelf.end(sample_id)

    def _drop(self, group: Group, sample_id: str, reason: str) -> None:
        self.note(journal.Dropped(group.group_id, sample_id, reason))
        self._end(sample_id, SampleState.DROPPED)
        self._dropped[reason] += 1
        del group.samples[sample_id]

    def _remove(self, group_id: str) -> None:
        del self._groups[group_id]
        self.ready.discard(group_id)

    def _keep_begun(self, sample: Sample) -> None:
        if self.shelf.is_due(sample):
            self.note(journal.Begun(sample.group_id, sample.saved()))
