"""A checkpoint of several rollout processes: one state of the whole run, as an only process would give it.

Flows in: the ledger's books, and what each process has of its groups. Flows out: a `RolloutState`; from one, the books
to begin with and the part of each process. How many processes there are may change in between.
Invariants: the books say which groups live and whose they are; what a process tells of any other group, or of an
earlier admission of the same, is passed over. A group of which nobody can tell anything is made again, under the same
ids and from the same seeds, and nothing of it counts as dropped.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.ledger_books import LedgerBooks, LedgerGroup, Snapshot
from slimerl.rollout.process_calls import ProcessCalls, ProcessRefused
from slimerl.rollout.prompts import PromptStream
from slimerl.rollout.shares import shard_of_group
from slimerl.samples.books import StoreError
from slimerl.samples.messages import Path as Endpoint
from slimerl.samples.messages import RolloutState, SavedGroup, Status, decode
from slimerl.samples.rows import DataError

logger = logging.getLogger(__name__)

SHARE_S = 15.0
"""For a process to tell what it holds: one that ended takes less to be started again. The trainer waits meanwhile."""


def whole_state(
    books: LedgerBooks, shares: Mapping[int, Sequence[SavedGroup]], prompts: PromptStream, samples_per_group: int
) -> RolloutState:
    """Of the run. Args: `shares`: what each process has. Raises StoreError while a batch is out."""
    refuse_while_out(books)
    told = {(shard, group.group_id): group for shard, groups in shares.items() for group in groups}
    names = {position: prompts.at(position).group_id for position in sorted(books.groups)}
    groups = []
    for one in books.groups.values():
        name = names[one.position]
        found = None if one.shard is None else told.get((one.shard, name))
        if found is None or not _is_as_booked(one, found):
            ids = [f"{name}/{number}" for number in range(samples_per_group)]
            found = SavedGroup(name, one.version, ids, [])
        groups.append(found)
    # of a group that is still to be trained whoever goes on with it says what was dropped
    live = sum((Counter(one.settled.dropped) for one in books.groups.values() if one.settled), Counter[str]())
    dropped, said = books.dropped - live, books.told - live
    return RolloutState(books.batches_taken, books.cursor, books.trained, dict(dropped), dict(said), groups)


def refuse_while_out(books: LedgerBooks) -> None:
    """Raises StoreError."""
    if books.batches:
        raise StoreError(f"batch {sorted(books.batches)} is out; save after it was trained")


def _is_as_booked(group: LedgerGroup, saved: SavedGroup) -> bool:
    if saved.version != group.version:
        return False
    if group.settled is None:
        return True
    finished = {sample.payload.sample_id for sample in saved.samples}
    return not saved.missing and finished == {each.sample_id for each in group.settled.samples}


@dataclass(frozen=True)
class Resumed:
    """`books`: to begin with; `shares`: of each process that gets something."""

    books: Snapshot
    shares: dict[int, RolloutState]


def resumed(state: RolloutState, books: LedgerBooks, prompts: PromptStream, samples_per_group: int) -> Resumed:
    """Go on after a step. Args: `books`: empty ones.

    Raises:
        DataError: a group is of a prompt that does not exist.
        GateError: there are more groups, or older ones, than `rollout.max_staleness` allows.
    """
    found = prompts.positions(group.group_id for group in state.groups)
    if unknown := [group.group_id for group in state.groups if group.group_id not in found]:
        raise DataError(f"groups {', '.join(unknown[:4])} were begun before, but data.train_path has no such prompts")
    groups: list[LedgerGroup] = []
    shares: dict[int, list[SavedGroup]] = {}
    for group in state.groups:
        position = found[group.group_id]
        if group.samples or group.begun:
            shard = shard_of_group(position, len(books.shards))
            shares.setdefault(shard, []).append(group)
            groups.append(LedgerGroup(position, group.version, shard))
        else:
            groups.append(LedgerGroup(position, state.steps, None))
    accepted = state.steps * books.gate.groups_per_step
    _refuse_stale(replace(books.gate, version=state.steps, accepted=accepted, running=0), groups)
    admitted = state.trained + sum(state.dropped.values()) + len(groups) * samples_per_group
    counts = (admitted, state.trained, dict(state.dropped))
    shards, told = books.snapshot().shards, dict(state.dropped_told)
    snapshot = Snapshot(state.steps, state.cursor, accepted, state.steps, *counts, groups, shards, told, told)
    of_shard = {shard: RolloutState(state.steps, 0, 0, {}, {}, share) for shard, share in shares.items()}
    return Resumed(snapshot, of_shard)


def _refuse_stale(gate: StalenessGate, groups: Sequence[LedgerGroup]) -> None:
    """Raises GateError: there are too many, or one is too old."""
    for _ in groups:
        gate.admit_again()
    gate.check_ages([group.version for group in groups])


async def share_of(calls: ProcessCalls, process: int) -> list[SavedGroup]:
    """What another process has of its groups; nothing where it cannot tell: these are made again."""
    read = partial(decode, kind=RolloutState)
    try:
        state = await calls.ask_again(process, Endpoint.STATE, None, read, Deadline("its share of the state", SHARE_S))
    except (ProcessRefused, DeadlineExceeded) as error:
        logger.warning("rollout process %d: the checkpoint has nothing of its samples: %s", process, error)
        return []
    return state.groups


async def give_share(calls: ProcessCalls, process: int, share: RolloutState, deadline: Deadline) -> None:
    """Have another process go on with its part. Raises StoreError: it does not; DeadlineExceeded."""
    try:
        await calls.ask_again(process, Endpoint.RESTORE, share, partial(decode, kind=Status), deadline)
    except ProcessRefused as error:
        raise StoreError(f"rollout process {process} does not go on with its part: {error}") from error
