"""What a rollout process has where a run has several: its scheduler, its line to the ledger, and in the first the ledger.

Flows in: the spec, the process's number, its parts. Flows out: a service, whose tasks are to be run beside it.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slimerl.rollout.admission import StalenessGate
from slimerl.rollout.front import FrontService, ShardService
from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.rollout.ledger_desk import LedgerDesk, open_ledger
from slimerl.rollout.ledger_line import Ask, HttpLedger, LedgerLine
from slimerl.rollout.prompts import Prompt
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
    rollout, training = spec.rollout, spec.training
    gate = StalenessGate(
        training.prompts_per_step, rollout.max_staleness, training.steps, oversample=rollout.oversample
    )
    desk = await open_ledger(
        *(spec.run_dir / JOURNAL_DIR / _LEDGER, gate, rollout.samples_per_prompt, rollout.processes),
        *(LEASE_S, spec.deadlines.start_s),
    )
    try:
        yield desk
    finally:
        desk.close()


def build_service(desk: LedgerDesk | None, spec: RunSpec, *parts: Any, **options: Any) -> ShardService:
    """As the arguments of `ControlService`."""
    if desk is None:
        return ShardService(*parts, **options)
    return FrontService(*parts, **options, desk=desk, samples_per_group=spec.rollout.samples_per_prompt)


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
