"""The scheduler of one rollout process among several: makes the groups that the admission ledger orders, and no others.

Flows in: the ledger's orders, by its line (`ledger_line.py`). Flows out: samples in this process's store, and to the
ledger what became of each group.
Invariants: a group is begun once it was ordered and engines here serve the version that the order asks for; what the
ledger is told of a group the journal of this process has; a group that is to be forgotten is told of no more; where no
engine is left nothing waits for one.
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.group_notes import pack_notes
from slimerl.rollout.prompts import Drawn, PromptStream
from slimerl.rollout.scheduler import Scheduler
from slimerl.rollout.shard_link import ShardLink
from slimerl.rollout.statistics import GroupRecord, tokens_by_version, trace_groups
from slimerl.samples.books import GroupState, name_of_batch
from slimerl.samples.journal import Dropped, Record
from slimerl.samples.ledger_messages import NO_ENGINE, Held, LetGo, Make, Order, Settled
from slimerl.samples.messages import EngineState, RolloutState, SampleMeta, SavedGroup
from slimerl.samples.rows import DataError
from slimerl.samples.sample import FORK, TOKEN_BYTES, SampleState

logger = logging.getLogger(__name__)

VOID = "made_elsewhere"
"""Reason, in this store's books alone, of samples that the ledger has given to another shard."""
BEFORE = "before_restart"
"""Reason of what was dropped of a group that is live, before this process or this run: of that there are sums alone."""
MUCH_ROOM = 2**30
_GONE = frozenset({EngineState.DEAD, EngineState.DIRTY})
_UNGENERATED = frozenset({SampleState.QUEUED, SampleState.RUNNING, SampleState.INTERRUPTED})


@dataclass
class OrderedGate(StalenessGate):
    """Opens for groups that were ordered, in that order; what may be is the ledger's to say."""

    orders: deque[Make] = field(default_factory=deque)
    """Not begun yet."""
    forgetting: set[int] = field(default_factory=set)
    """Positions of groups whose samples are being ended; none of them is begun before that is done."""
    drawn: Make = field(default_factory=lambda: Make(0, -1))
    """The last that was."""

    def may_admit(self) -> bool:
        if not self.orders:
            return False
        return self.orders[0].version <= self.version and self.orders[0].position not in self.forgetting

    def draw(self) -> int:
        """Position of the next group."""
        self.drawn = self.orders.popleft()
        return self.drawn.position

    @property
    def next_batch(self) -> int:
        """That the drawn group is due in, where none comes to nothing."""
        return self.drawn.position // self.groups_per_step

    def admit(self) -> int:
        return self.drawn.version

    def admit_again(self) -> None: ...

    def check_ages(self, versions: Sequence[int]) -> None: ...

    def accept(self) -> None: ...

    def drop(self) -> None: ...


@dataclass
class OrderedPrompts(PromptStream):
    """The prompts of ordered groups."""

    next_position: Callable[[], int] = lambda: 0

    def draw(self) -> Drawn:
        return self.at(self.next_position())


@dataclass
class ShardScheduler(Scheduler):
    """`gate` is an `OrderedGate`, `prompts` draw from it. `news` is called when the ledger is to hear of something."""

    link: ShardLink = field(default_factory=lambda: ShardLink(0, 1))
    news: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, float]] = dict
    """What else there is to tell with a group."""
    awaits_engines: Callable[[], bool] = lambda: False
    """Are some expected to come, or to be written to?"""
    _positions: dict[str, int] = field(default_factory=dict)
    """Of groups in the store, by id."""
    _names: dict[int, str] = field(default_factory=dict)
    """The other way round."""
    _drops: dict[str, Counter[str]] = field(default_factory=dict)
    """Samples of groups in the store that were dropped, by reason."""
    _returning: set[int] = field(default_factory=set)
    """Positions of groups that are given back, once their samples have ended."""
    _noted_s: float = field(default_factory=time.monotonic)
    """When figures were told last."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.store.note = self._note

    @property
    def ordered(self) -> OrderedGate:
        if not isinstance(self.gate, OrderedGate):
            raise TypeError(f"a shard admits what is ordered, by an OrderedGate, not by {type(self.gate).__name__}")
        return self.gate

    def room(self) -> int:
        """Groups that may be ordered beside those that were: as if all that is under way grew to its longest."""
        states = [engine.state for engine in self.dispatcher.router.engines()]
        if states and _GONE.issuperset(states):
            return 0 if self.awaits_engines() else NO_ENGINE  # before the first has registered, they may yet come
        settings, store = self.settings, self.store
        sample = settings.params.max_new_tokens * TOKEN_BYTES
        waiting = len(self.ordered.orders) * settings.samples_per_group
        free = self.max_buffered_bytes - store.shelf.size - (store.counts().running + waiting) * sample
        if math.isinf(free):
            return MUCH_ROOM
        return max(0, int(free // (sample * settings.samples_per_group)))

    def offer(self) -> int:
        """The room, to be told. Where no engine is left, what these were to make is given back."""
        room = self.room()
        if room == NO_ENGINE:
            self._give_back()
        return room

    def carry_out(self, order: Order) -> None:
        """What the ledger says, each order once."""
        match order:
            case Make():
                self.ordered.orders.append(order)
                self.wake()
            case LetGo(step=step, positions=positions):
                self._let_go(step, positions)
            case _:
                self._forget(order.position)

    def go_on_with(self, share: RolloutState) -> None:
        """What a checkpoint has of groups that are to be gone on with here; told again it is the same.

        A group that was ordered anew meanwhile is made as it was ordered: a process that was this shard has ended
        before it could say that it has the group.

        Raises: as `Scheduler.restore`.
        """
        if self.store.counts().admitted:
            return  # what this shard does not say that it holds the ledger has made again
        positions = self.prompts.positions(group.group_id for group in share.groups)
        groups = [group for group in share.groups if positions.get(group.group_id) not in self.link.held]
        self.restore(msgspec.structs.replace(share, groups=groups))

    def restore(self, state: RolloutState) -> None:
        """Go on where a process stopped that was this shard, or a run; what it holds is told with the next join.

        Raises: as `Scheduler.restore`.
        """
        positions = self.prompts.positions(group.group_id for group in state.groups)
        for group in state.groups:
            if (position := positions.get(group.group_id)) is None:
                raise DataError(f"group '{group.group_id}' was begun before, but data.train_path has no such prompt")
            self._positions[group.group_id], self._names[position] = position, group.group_id
        super().restore(state)
        live = {*self.store.open_groups(), *self.store.ready}
        for group in state.groups:
            if group.group_id not in live:
                self._end(group.group_id, drop=False)
        held = [group for group in state.groups if group.group_id in live]
        self._drops |= {group.group_id: Counter({BEFORE: lost}) for group in held if (lost := self._dropped_of(group))}
        self.link.hold(self._held(positions[group.group_id], group) for group in held)

    def _held(self, position: int, group: SavedGroup) -> Held:
        samples = self.store.ready_samples(group.group_id)
        if not samples:
            return Held(position, group.version)
        return Held(position, group.version, Settled(position, samples, dict(self._drops.get(group.group_id, {}))))

    def _dropped_of(self, group: SavedGroup) -> int:
        left = sum(FORK not in sample_id.removeprefix(group.group_id) for sample_id in group.sample_ids)
        return self.settings.samples_per_group - left

    def _note(self, record: Record) -> None:
        if isinstance(record, Dropped):
            self._drops.setdefault(record.group_id, Counter())[record.reason] += 1
        if self.journal is not None:
            self.journal.note(record)

    def _has_room(self) -> bool:
        return True  # it was asked for before the order was given

    def _admit(self, drawn: Drawn) -> None:
        position = self.ordered.drawn.position
        self._positions[drawn.group_id], self._names[position] = position, drawn.group_id
        super()._admit(drawn)

    def _lost(self, group_id: str) -> None:
        if self._positions[group_id] not in self.ordered.forgetting | self._returning:
            super()._lost(group_id)

    def _settle(self, group_id: str, state: GroupState) -> None:
        super()._settle(group_id, state)
        if state is not GroupState.OPEN:
            self._tell(group_id)

    def _tell(self, group_id: str) -> None:
        """The ledger of a group's end here, which is good where samples of it are ready."""
        samples = self.store.ready_samples(group_id)
        dropped = dict(self._drops.get(group_id, {}))
        position = self._positions[group_id]
        if position in self.ordered.forgetting:
            self._end(group_id, drop=bool(samples))
            self.ordered.forgetting.discard(position)
            self._returning.discard(position)
            self.wake()
            return
        if position in self._returning:
            self._end(group_id, drop=bool(samples))
            self._returning.discard(position)
            self.link.returned(position)
            self.news()
            return
        # of a group that came to nothing nothing is told with a batch: what was counted goes with the next
        notes = self._notes(group_id, samples) if samples else b""
        self.link.settled(Settled(position, samples, dropped, notes))
        if not samples:
            self._end(group_id, drop=False)
        self.news()

    def _notes(self, group_id: str, samples: list[SampleMeta]) -> bytes:
        tokens = tokens_by_version(self.store.payloads(each.sample_id for each in samples))
        figures = self.judge.take_figures() | self.dispatcher.take_figures() | self.figures()
        now = time.monotonic()
        seconds, self._noted_s = now - self._noted_s, now
        record, replaced = self._records.get(group_id) or GroupRecord(), self._informative.take_replaced()
        return pack_notes(record, tokens, figures, seconds, replaced)

    def unsynced(self) -> list[str]:
        """Engines that have registered since the last sync."""
        router = self.dispatcher.router
        if router.version < 0 or self.dispatcher.held:
            return []
        return [one.engine_id for one in router.engines() if one.state is EngineState.JOINING]

    def _let_go(self, step: int, positions: list[int]) -> None:
        names = [self._names[position] for position in positions]
        trace_groups(step, [self._records[name] for name in names])
        self.store.lease(name_of_batch(step), names)
        self.batches_taken = step
        for name in names:
            self._end(name, drop=False)
        self.trained(name_of_batch(step))

    def _forget(self, position: int) -> None:
        queued = [order for order in self.ordered.orders if order.position == position]
        if queued:
            self.ordered.orders.remove(queued[0])
            return
        group_id = self._names.get(position)
        if group_id is None:
            return  # it has come to nothing since the ledger was told of it
        logger.warning("group %s is forgotten: the ledger has given it to another shard, or booked its end", group_id)
        if self.store.ready_samples(group_id):
            self._end(group_id, drop=True)
            return
        self.ordered.forgetting.add(position)
        for sample_id in self._under_way(group_id):
            self._tasks[sample_id].cancel()

    def _give_back(self) -> None:
        """All that needs an engine yet."""
        for order in self.ordered.orders:
            self.link.returned(order.position)
        self.ordered.orders.clear()
        for group_id in self.store.open_groups():
            position, samples = self._positions[group_id], self._under_way(group_id)
            needs_engine = any(self.store.state(each) in _UNGENERATED for each in samples)
            if needs_engine and position not in self.ordered.forgetting | self._returning:
                logger.warning("group %s is given back: no engine is left here to make it", group_id)
                self._returning.add(position)
                for sample_id in samples:
                    self._tasks[sample_id].cancel()

    def _under_way(self, group_id: str) -> list[str]:
        """Samples of a group that have a task."""
        return [sample_id for sample_id in self._tasks if self.store.sample(sample_id).group_id == group_id]

    def _end(self, group_id: str, drop: bool) -> None:
        """Nothing is known of the group from now on."""
        if drop:
            self.store.drop_group(group_id, VOID)
        self._records.pop(group_id, None)
        self._drops.pop(group_id, None)
        del self._names[self._positions.pop(group_id)]
