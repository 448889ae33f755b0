"""A rollout with a journal, which stays for the next process as it was left."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from scene import Scene, rollout

from slimerl.rollout.journal_file import JournalFile

Act = Callable[[Scene], Coroutine[Any, Any, Any]]
Begin = Callable[[Scene, JournalFile], Awaitable[None]]


def play(
    act: Act, directory: Path, begin: Begin, killed: bool = True, segment_bytes: int = 2**26, **options: Any
) -> Any:
    """What `act` returns, in a rollout that `begin` has put in order with its journal; `killed`: the journal stays as
    it is when `act` has ended."""

    async def run() -> Any:
        async with asyncio.timeout(60), rollout(**options) as made:
            journal = made.scheduler.journal = JournalFile(directory, segment_bytes)
            made.store.note = made.scheduler.served.note = journal.note
            await begin(made, journal)
            try:
                result = await act(made)
                await journal.written()
                if killed:
                    shutil.copytree(directory, directory.with_name("kept"))
                return result
            finally:
                await made.scheduler.close()
                journal.close()

    result = asyncio.run(run())
    if killed:
        shutil.rmtree(directory)
        directory.with_name("kept").rename(directory)
    return result
