"""Keeps groups of samples under way while gate and router admit, and hands out finished batches.

Flows in: prompts, new policy versions. Flows out: `BatchManifest`s and payloads, through the sample store.
Invariants: a group is admitted only by the staleness gate; every sample of it reaches the store's books as rewarded
or dropped with a reason, whatever happens to the task that makes it (an answer, a failure, a cancellation even before
its first step, a bug); the loop outlives them all.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from slimerl.engine.protocol import SamplingParams
from slimerl.rollout.admission import StalenessGate, choose_batch
from slimerl.rollout.agents.forks import without_forks
from slimerl.rollout.agents.loop import AgentLoop, SingleTurn
from slimerl.rollout.dispatch import Dispatcher
from slimerl.rollout.dynamic_sampling import InformativeGroups, NothingToLearn
from slimerl.rollout.journal_file import JournalFile
from slimerl.rollout.judge import Judge
from slimerl.rollout.making import SampleLost, SampleMaker
from slimerl.rollout.parts import Parts
from slimerl.rollout.prompts import Drawn, PromptStream
from slimerl.rollout.statistics import (
    GroupRecord,
    batch_metrics,
    length_error,
    partial_metrics,
    token_staleness,
    trace_groups,
)
from slimerl.samples.books import name_of_batch
from slimerl.samples.journal import Books, HandedOut, Recovered, unheard
from slimerl.samples.messages import BatchManifest, RolloutState
from slimerl.samples.sample import TOKEN_BYTES, Sample
from slimerl.samples.served import ServedWeights
from slimerl.samples.store import GroupState, SampleStore

logger = logging.getLogger(__name__)

HOPELESS_BATCHES = 2
HOPELESS_GROUPS = 8
"""So many batches' worth of groups lost in a row, and no fewer than so many groups, stop the run: more of the same
would not help."""


class RolloutStopped(RuntimeError):
    """No batch will come any more; the message says why."""


@dataclass(frozen=True)
class SchedulerSettings:
    """`params` are those of every sample but for the seed."""

    groups_per_step: int
    samples_per_group: int
    run_seed: int
    params: SamplingParams
    on_reward_failure: Literal["drop", "zero"] = "drop"
    chunk_tokens: int | None = None
    """Of one request at most."""
    dynamic_sampling_rounds: int = 0
    """Of the algorithm; 0: every group is trained on."""
    routing: bool = False
    """Engines are asked which experts they chose."""


@dataclass
class Scheduler:
    """`run()` is the loop; everything else is called by the service."""

    settings: SchedulerSettings
    prompts: PromptStream
    gate: StalenessGate
    store: SampleStore
    dispatcher: Dispatcher
    judge: Judge
    agent: AgentLoop = field(default_factory=SingleTurn)
    journal: JournalFile | None = None
    served: ServedWeights = field(default_factory=ServedWeights)
    max_buffered_bytes: float = math.inf
    """Back-pressure: see `_has_room`."""
    progressed: Callable[[], None] = lambda: None
    """Called whenever a batch may have become ready, or impossible."""
    batches_taken: int = 0
    stopped: str = ""
    """Why no batch will come any more."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _records: dict[str, GroupRecord] = field(default_factory=dict)
    _manifests: dict[str, BatchManifest] = field(default_factory=dict)
    _dropped_before: Counter[str] = field(default_factory=Counter)
    _lost_in_a_row: int = 0
    _maker: SampleMaker = field(init=False)
    _informative: InformativeGroups = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        lengths = self.dispatcher.order.lengths
        parts = Parts(settings.params, settings.run_seed, settings.chunk_tokens, lengths, settings.routing)
        made_with = (self.agent, parts, self.dispatcher, self.judge, self.store, settings.on_reward_failure)
        self._maker = SampleMaker(*made_with)
        self._informative = InformativeGroups(settings.dynamic_sampling_rounds, settings.groups_per_step)
        if self.journal is not None:
            self.store.note = self.served.note = self.journal.note

    async def run(self) -> None:
        """Admit groups until cancelled; ends the samples under way then."""
        try:
            while True:
                while not self.stopped and self.gate.may_admit() and self._has_room():
                    # All of them, wherever there is room: the dispatcher's order chooses among what waits.
                    self._admit(self.prompts.draw())
                    await asyncio.sleep(0)
                self._wake.clear()
                await self._wake.wait()
        finally:
            await self.close()

    def _has_room(self) -> bool:
        # As if all that is under way grew to its longest. The trainer waits for groups of the next batch.
        under_way = self.store.counts().running * self.settings.params.max_new_tokens * TOKEN_BYTES
        return self.store.shelf.size + under_way < self.max_buffered_bytes or self.gate.next_batch <= self.batches_taken

    def wake(self) -> None:
        """A slot came free, an engine changed, or a new version is out."""
        self._wake.set()

    def advance(self, version: int) -> None:
        """Engines serve `version`."""
        self.gate.advance(version)
        self.wake()

    async def close(self) -> None:
        # What is under way is not lost to a process that takes over.
        self.store.note = unheard
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- batches

    def take_batch(self, step: int) -> BatchManifest | None:
        """The batch of `step`, leased; None while it is not complete. Asked again it is the same batch.

        Raises:
            StoreError: it was trained already.
            RolloutStopped: it will never be complete.
        """
        batch_id = name_of_batch(step)
        if self.store.batch(batch_id) is not None:
            return self._manifests[batch_id]
        settings, gate, store = self.settings, self.gate, self.store
        if self.batches_taken >= gate.steps:
            raise RolloutStopped(f"all {gate.steps} batches of the run have been handed out (training.steps)")
        chosen = None
        if len(store.ready) >= settings.groups_per_step:
            chosen = choose_batch(store.unleased(), self.batches_taken, settings.groups_per_step, gate.max_staleness)
        if chosen is None:
            if self.stopped:
                raise RolloutStopped(self.stopped)
            return None
        batch = store.lease(batch_id, chosen)
        self.batches_taken += 1
        dropped = Counter(store.counts().dropped)
        records = [self._records.pop(group_id) for group_id in chosen]
        new_drops = dropped - self._dropped_before
        payloads = store.payloads(each.sample_id for each in batch.samples)
        metrics = batch_metrics(batch.samples, records, new_drops, gate.version, self._informative.take_replaced())
        metrics |= token_staleness(payloads, gate.version)
        metrics |= self.judge.take_figures() | self.dispatcher.take_figures()
        metrics |= length_error(batch.samples, dict(zip(chosen, records, strict=True)))
        metrics["rollout/buffered_mib"] = store.shelf.size / 2**20
        metrics |= partial_metrics([store.sample(sample_id) for sample_id in self._tasks])
        self._dropped_before = dropped
        trace_groups(step, records)
        manifest = BatchManifest(batch_id, step, list(batch.samples), metrics)
        self._manifests[batch_id] = manifest
        store.note(HandedOut(batch_id, step, metrics, dict(dropped)))
        self.wake()
        return manifest

    def trained(self, batch_id: str) -> None:
        """The trainer is done with a batch. Raises StoreError."""
        self.store.trained(batch_id)
        self._manifests.pop(batch_id, None)
        if self.journal is not None and self.journal.is_long:
            self.journal.begin(self.books())
        self.wake()

    # --- checkpoints

    def state(self) -> RolloutState:
        """What to keep so that another process can go on. Raises StoreError while a batch is leased."""
        counts = self.store.counts()
        return RolloutState(
            steps=self.batches_taken,
            cursor=self.prompts.cursor,
            trained=counts.trained,
            dropped=counts.dropped,
            dropped_told=dict(self._dropped_before),
            groups=self.store.saved_groups(),
        )

    def books(self) -> Books:
        """The metadata of all of this, with which a segment of the journal begins."""
        counts, leases, told = self.store.counts(), self.store.leases(), dict(self._dropped_before)
        handed_out = [HandedOut(each.batch_id, each.step, each.metrics, told) for each in self._manifests.values()]
        steps, groups = self.batches_taken - len(leases), self.store.booked_groups()
        cursor, weights = self.prompts.cursor, self.served.weights
        return Books(steps, cursor, counts.trained, counts.dropped, told, groups, leases, handed_out, weights)

    def recover(self, recovered: Recovered) -> None:
        """Go on where a process ended; a batch that it had handed out is leased, and the same when asked for again.

        Raises: as `restore`.
        """
        self.served.weights = recovered.weights
        self.restore(recovered.state)
        leases = {lease.batch_id: lease.group_ids for lease in recovered.leases}
        for told in recovered.handed_out:
            batch = self.store.lease(told.batch_id, leases[told.batch_id])
            self.batches_taken += 1
            self._records = {name: each for name, each in self._records.items() if name not in batch.group_ids}
            self._manifests[told.batch_id] = BatchManifest(told.batch_id, told.step, list(batch.samples), told.metrics)
            self.store.note(told)

    def restore(self, state: RolloutState) -> None:
        """Go on where another process stopped: what samples have is taken over, the others are made again.

        Raises:
            StoreError: groups were admitted here already.
            DataError: a group is of a prompt that does not exist.
            GateError: there are more groups, or older ones, than `rollout.max_staleness` allows.
        """
        groups, forks = zip(*map(without_forks, state.groups), strict=True) if state.groups else ((), ())
        drawn = [self.prompts.again(group.group_id) if group.missing else None for group in groups]
        self.store.restore(state.trained, state.dropped, [name_of_batch(step + 1) for step in range(state.steps)])
        self.prompts.cursor = state.cursor
        self.batches_taken = state.steps
        self._dropped_before = Counter(state.dropped_told)
        if self.journal is not None:
            self.journal.begin(self.books())
        self.gate.resume(state.steps)
        if self.served.weights.version >= 0:
            # what is trained may be a step further: nothing of that version may begin before engines serve it
            self.gate.version = self.served.weights.version
        self.gate.check_ages([group.version for group in groups])
        self._maker.forks = {name: fork for of_group in forks for name, fork in of_group.items()}
        for group, again in zip(groups, drawn, strict=True):
            batch = self.gate.next_batch
            self.gate.admit_again()
            begun = {each.payload.sample_id: Sample.restored(each, group.group_id) for each in group.begun}
            missing = (
                [begun.get(sample_id) or _sample(again, sample_id) for sample_id in group.missing]
                if again is not None
                else []
            )
            became = self.store.admit_saved(group, missing)
            if became is GroupState.DROPPED:
                self.gate.drop()
                continue
            self._records[group.group_id] = GroupRecord()
            if became is GroupState.READY:
                self._keeps(group.group_id)
            if again is not None:
                self.dispatcher.order.admit(group.group_id, again.prompt.prompt_id, batch)
                self._begin(missing, again.prompt.answer)
        logger.info(
            "going on after step %d: %d prompts drawn, %d groups live, %d samples of them to be finished",
            *(state.steps, state.cursor, len(drawn), sum(len(group.missing) for group in groups)),
        )

    # --- groups

    def _admit(self, drawn: Drawn) -> None:
        self.dispatcher.order.admit(drawn.group_id, drawn.prompt.prompt_id, self.gate.next_batch)
        version = self.gate.admit()
        ids = [f"{drawn.group_id}/{number}" for number in range(self.settings.samples_per_group)]
        samples = [_sample(drawn, sample_id) for sample_id in ids]
        self.store.admit(drawn.group_id, samples, version)
        self._records[drawn.group_id] = GroupRecord()
        self._begin(samples, drawn.prompt.answer)

    def _begin(self, samples: Sequence[Sample], answer: str) -> None:
        """Make samples of a group that the store and the gate have admitted."""
        for sample in samples:
            making = self._maker.make(sample, self._records[sample.group_id], answer)
            task = asyncio.get_running_loop().create_task(making)
            self._tasks[sample.sample_id] = task
            # Not a `finally` in the task: one that is cancelled before its first step never gets there.
            task.add_done_callback(partial(self._ended, sample))

    def _ended(self, sample: Sample, task: "asyncio.Task[None]") -> None:
        """Book what came of a sample's task."""
        del self._tasks[sample.sample_id]
        if task.cancelled():
            reason, detail = "cancelled", "its task was cancelled"
        elif (error := task.exception()) is None:
            for fork in map(self.store.sample, self.store.forks(sample.sample_id)):
                fork.reward, fork.correct = sample.reward, sample.correct
                self.store.rewarded(fork.sample_id)
            self._settle(sample.group_id, self.store.rewarded(sample.sample_id))
            return
        elif isinstance(error, SampleLost):
            reason, detail = error.reason, str(error)
        else:
            logger.error("sample %s: an unexpected error", sample.sample_id, exc_info=error)
            reason, detail = "internal_error", repr(error)
        logger.warning("sample %s is dropped (%s): %s", sample.sample_id, reason, detail)
        for fork_id in self.store.forks(sample.sample_id):
            self.store.drop(fork_id, reason)
        self._settle(sample.group_id, self.store.drop(sample.sample_id, reason))

    def _settle(self, group_id: str, state: GroupState) -> None:
        """Tell the gate what became of the group, if it is settled."""
        if state is GroupState.OPEN:
            return
        self._records[group_id].foretold_tokens = self.dispatcher.order.forget(group_id)
        if state is GroupState.READY:
            self._finish(group_id)
        else:
            logger.warning("group %s is dropped: too few of its samples are left", group_id)
            del self._records[group_id]
            self.gate.drop()
            self._lost(group_id)
        self.wake()
        self.progressed()

    def _lost(self, group_id: str) -> None:
        """A group came to nothing."""
        self._lost_in_a_row += 1
        self._give_up_if_hopeless()

    def _finish(self, group_id: str) -> None:
        """All answers of a group are judged."""
        self._lost_in_a_row = 0
        if self._keeps(group_id):
            self._records[group_id].ready_s = time.monotonic()
        try:
            self._informative.check()
        except NothingToLearn as error:
            self._stop(str(error))

    def _keeps(self, group_id: str) -> bool:
        """A finished group is accepted, or replaced where nothing can be learnt from it."""
        if (reason := self._informative.add([each.correct for each in self.store.ready_samples(group_id)])) is None:
            self.gate.accept()
            return True
        logger.info("group %s is replaced (%s)", group_id, reason)
        self.store.drop_group(group_id, reason)
        del self._records[group_id]
        self.gate.drop()
        return False

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            logger.error("%s", why)

    def _give_up_if_hopeless(self) -> None:
        limit = max(HOPELESS_GROUPS, HOPELESS_BATCHES * self.settings.groups_per_step)
        if self._lost_in_a_row < limit or self.stopped:
            return
        reasons = ", ".join(f"{reason} {number}" for reason, number in self.store.counts().dropped.items())
        self._stop(f"{self._lost_in_a_row} groups in a row came to nothing; samples dropped so far: {reasons}")


def _sample(drawn: Drawn, sample_id: str) -> Sample:
    return Sample(sample_id, drawn.group_id, drawn.prompt.prompt_id, drawn.prompt.tokens)
