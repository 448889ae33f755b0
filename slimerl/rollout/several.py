"""What a rollout process has where a run has several: what it makes, its line to the ledger, or the ledger itself.

Flows in: the spec, the process's number, its parts. Flows out: a service, and tasks that are to be run beside it.
"""

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.front import FrontService, ShardService
from slimerl.rollout.journal_places import ledger_log_of
from slimerl.rollout.ledger_desk import LedgerDesk, open_ledger
from slimerl.rollout.ledger_line import Ask, LedgerLine, remote_ledger
from slimerl.rollout.process_calls import ProcessCalls
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.service import ControlService
from slimerl.rollout.shard_link import ShardLink
from slimerl.rollout.shard_scheduler import OrderedGate, OrderedPrompts, ShardScheduler
from slimerl.rollout.shared_evaluation import over_all
from slimerl.spec import RunSpec

LEASE_S = 60.0
"""Of what a process holds, since it was heard of; one that is started again takes less to come back."""
RESTORE = 0.8
"""Of `deadlines.request_s`, for which the trainer waits."""


@dataclass(frozen=True)
class Place:
    """Which of the rollout processes this one is. `takes_over`: one that was it before has ended; `desk`: the ledger,
    in the first of several."""

    process: int
    takes_over: bool
    desk: LedgerDesk | None


def gate_of(spec: RunSpec) -> StalenessGate:
    """Of the run, whoever asks it."""
    rollout, training = spec.rollout, spec.training
    groups, steps = training.prompts_per_step, training.steps
    return StalenessGate(groups, rollout.max_staleness, steps, oversample=rollout.oversample)


def ordered(spec: RunSpec, process: int, prompts: list[Prompt]) -> tuple[OrderedGate, OrderedPrompts, ShardLink]:
    """Gate, prompts and link of a process. The number of its incarnation rises with the clock."""
    gate = OrderedGate(spec.training.prompts_per_step, spec.rollout.max_staleness, spec.training.steps)
    link = ShardLink(process, time.time_ns())
    return gate, OrderedPrompts(prompts, spec.seed, next_position=gate.draw), link


@asynccontextmanager
async def ledger_of(spec: RunSpec, process: int, takes_over: bool) -> AsyncIterator[LedgerDesk | None]:
    """In the first of several processes the ledger; None elsewhere. Raises JournalDamaged, OSError."""
    if process or spec.rollout.processes == 1:
        yield None
        return
    desk = await open_ledger(
        *(ledger_log_of(spec), gate_of(spec)),
        *(spec.rollout.samples_per_prompt, spec.rollout.processes),
        *(LEASE_S, spec.deadlines.start_s),
        must=takes_over,
    )
    try:
        yield desk
    finally:
        desk.close()


def service_kind(spec: RunSpec, desk: LedgerDesk | None) -> Callable[..., ControlService]:
    """What takes the arguments of `ControlService`. Args: `desk`: of the first process, where there are several."""
    if spec.rollout.processes == 1:
        return ControlService
    if desk is None:
        return ShardService
    size, restore_s = spec.rollout.samples_per_prompt, RESTORE * spec.deadlines.request_s
    return partial(FrontService, desk=desk, samples_per_group=size, restore_s=restore_s)


@asynccontextmanager
async def beside_it(
    spec: RunSpec, service: ControlService, desk: LedgerDesk | None
) -> AsyncIterator[list[Coroutine[Any, Any, None]]]:
    """What is to be run beside a service that has taken over what there was: nothing where it is the only one."""
    if not isinstance(service, ShardService):
        yield []
        return
    scheduler = service.scheduler
    if not isinstance(scheduler, ShardScheduler) or scheduler.journal is None:
        raise TypeError("one of several rollout processes makes what is ordered, and keeps a journal")
    calls = ProcessCalls(spec.run_dir)
    if isinstance(service, FrontService):
        service.calls = calls
        service.catch_up()
        service.evaluation = over_all(service.evaluation, calls, spec.rollout.processes)
    ask: Ask = desk.hear if desk is not None else remote_ledger(calls)
    line = LedgerLine(
        *(scheduler.link, ask, scheduler.offer, scheduler.carry_out, spec.deadlines.start_s),
        journaled=scheduler.journal.written,
        stopped=lambda: scheduler.stopped,
        unsynced=scheduler.unsynced,
        serving=lambda: len(service.router.serving()),
    )
    scheduler.news = service.news = line.wake
    try:
        yield [line.run(), *([] if desk is None else [desk.watch()])]
    finally:
        await calls.close()
