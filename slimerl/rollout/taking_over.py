"""A rollout role goes on where one ended in the same start of the run.

Flows in: the journal of the process before. Flows out: its books in this one, and the engines that it knew, expected
to register again.
Invariant: what is taken over is all that was told to anybody, or nothing; a process that was started to take over and
finds no journal serves nobody, for it would hand out the run's first samples once more.
"""

import asyncio
import logging
from pathlib import Path

from slimerl.rollout.journal_file import JournalFile, read_journal
from slimerl.rollout.service import ControlService
from slimerl.samples.journal import JournalDamaged, Recovered

logger = logging.getLogger(__name__)

AT_ONCE_S = 10.0
"""For an engine role that runs to notice the new address and to register."""


async def take_over(
    service: ControlService, journal: JournalFile, directory: Path, returns_s: float, must: bool
) -> None:
    """From the process before, if there was one; `journal` is the one that counts from then on.

    Args:
        returns_s: for an engine that ended meanwhile to be started again.
        must: there was a process before.

    Raises:
        JournalDamaged, OSError, DataError: what it held cannot be known, or is of other prompts.
    """
    recovered = await asyncio.to_thread(read_journal, directory)
    if recovered is not None:
        logger.info("taking over from the journal of a process that ended")
        service.scheduler.recover(recovered)
        expect_engines(service, recovered, returns_s)
    elif must:
        raise JournalDamaged(f"{directory} holds nothing to take over from; the run has to start over")
    else:
        journal.begin(service.scheduler.books())
    journal.publish()
    await journal.written()


def expect_engines(service: ControlService, recovered: Recovered, returns_s: float) -> None:
    """Those that the process before knew, and the version that they have to serve."""
    if recovered.weights.version >= 0:
        service.router.release(recovered.weights.version, [], {})
    service.returning.outlived(service.scheduler.served.expected, AT_ONCE_S, returns_s)
