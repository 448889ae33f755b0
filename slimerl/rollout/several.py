"""What a rollout process has where a run has several: what it makes, its line to the ledger, or the ledger itself.

Flows in: the spec, the process's number, its parts. Flows out: a service, whose tasks are to be run beside it.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.front import FrontService, ShardService
from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.rollout.ledger_desk import LedgerDesk, open_ledger
from slimerl.rollout.ledger_line import Ask, HttpLedger, LedgerLine
from slimerl.rollout.prompts import Prompt
from slimerl.rollout.service import ControlService
from slimerl.rollout.shard_link import ShardLink
from slimerl.rollout.shard_scheduler import OrderedGate, OrderedPrompts, ShardScheduler
from slimerl.spec import RunSpec

LEASE_S = 60.0
"""Of what a process holds, since it was heard of; one that is started again takes less to come back."""
_LEDGER = "ledger"


def journal_of(spec: RunSpec, process: int) -> Path:
    """Directory of the journal of a rollout process."""
    directory = spec.run_dir / JOURNAL_DIR
    return directory if spec.rollout.processes == 1 else directory / f"process-{process}"


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
async def ledger_of(spec: RunSpec, process: int) -> AsyncIterator[LedgerDesk | None]:
    """In the first process the ledger; None elsewhere. Raises JournalDamaged, OSError."""
    if process:
        yield None
        return
    desk = await open_ledger(
        *(spec.run_dir / JOURNAL_DIR / _LEDGER, gate_of(spec)),
        *(spec.rollout.samples_per_prompt, spec.rollout.processes),
        *(LEASE_S, spec.deadlines.start_s),
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
    return partial(FrontService, desk=desk, samples_per_group=spec.rollout.samples_per_prompt)


@asynccontextmanager
async def line_of(spec: RunSpec, service: ShardService, desk: LedgerDesk | None) -> AsyncIterator[LedgerLine]:
    """To the ledger, here or in the first process; to be `run`."""
    scheduler = service.scheduler
    if not isinstance(scheduler, ShardScheduler) or scheduler.journal is None:
        raise TypeError("one of several rollout processes makes what is ordered, and keeps a journal")
    remote = HttpLedger(spec.run_dir)
    ask: Ask = desk.hear if desk is not None else remote
    line = LedgerLine(
        *(scheduler.link, ask, scheduler.room, scheduler.carry_out, spec.deadlines.start_s),
        journaled=scheduler.journal.written,
        stopped=lambda: scheduler.stopped,
        unsynced=scheduler.unsynced,
    )
    scheduler.news = service.news = line.wake
    try:
        yield line
    finally:
        await remote.close()
