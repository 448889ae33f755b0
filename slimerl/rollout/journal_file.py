"""The journal of the sample store on the disk: segments in RUN_DIR/journal, written by a thread of its own.

Flows in: records, in the order of what happened. Flows out: the segments, and from those of an ended process what it
held.

Invariants:
    after `written()` every record noted before it is the operating system's, and outlives this process, however that
    ends (not the machine: a run whose machine failed goes on from its checkpoint);
    a segment has its name once its books are in it, and is removed once no live sample has its payload there;
    a journal that cannot be written is removed as a whole: one with a gap would be a smaller store.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.rollout.ledger_books import Snapshot
from slimerl.samples.journal import Begun, Books, Finished, Record, Recovered, Replay, frame, read_frames

logger = logging.getLogger(__name__)

JOURNAL_DIR = "journal"
TAKE_OVER = "--take-over"
"""Argument of a rollout role that is started in the place of one that ended."""
SEGMENT_BYTES = 64 * 2**20
"""A segment that is this long is followed by another, which lets go of what has been trained."""
WRITE_S = 120.0
"""For what is noted to reach the operating system."""
_SEGMENT = "{:08d}.segment"
_PART = ".part"


def has_journal(directory: Path) -> bool:
    """Has a process left one that another can take over from?"""
    return bool(_segments(directory))


def forget_journal(directory: Path) -> None:
    """Of a process that has closed it: nothing is to be taken over from it. Raises OSError."""
    _remove(_segments(directory))


def read_journal(directory: Path) -> Recovered | None:
    """What the process that wrote it held when it ended; None: there is no journal.

    Raises:
        JournalDamaged: it was changed since.
        OSError: it cannot be read.
    """
    replay = Replay()
    replay.apply(read_records(directory, Record))
    return replay.result()


def read_records(directory: Path, kind: Any) -> Iterator[Any]:
    """All that is written there, oldest first. Raises as `read_journal`.

    Args:
        kind: of the records, as msgspec takes it.
    """
    for path in _segments(directory):
        yield from read_frames(path.read_bytes(), str(path), kind)


class JournalFile:
    """Of one process. `begin` comes first, then `publish`: until then the journal of the process before counts."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._number = max((int(path.stem) for path in _segments(directory)), default=0)
        self._old = _segments(directory)
        self._published = False
        self._bytes = 0
        self._where: dict[str, int] = {}
        """Segment of the newest payload of each sample that was live when the present one began, or came since."""
        self._failure = ""
        self._queue: queue.SimpleQueue[bytes | Callable[[], None] | None] = queue.SimpleQueue()
        self._descriptor = -1
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why there is no journal any more; empty: there is one."""
        return self._failure

    @property
    def is_long(self) -> bool:
        return self._bytes >= self._segment_bytes

    def note(self, record: msgspec.Struct) -> None:
        """See `SampleStore.note`."""
        if self._failure:
            return
        data = frame(record)
        self._bytes += len(data)
        if isinstance(record, Begun | Finished):
            self._where[record.sample.payload.sample_id] = self._number
        self._queue.put(data)

    def begin(self, books: Books | Snapshot) -> None:
        """The next segment; those in which no live sample has its payload go."""
        self._number += 1
        self._bytes = 0
        number, published = self._number, self._published
        self._queue.put(lambda: self._open(number, published))
        self.note(books)
        live = books.payloads()
        self._where = {sample_id: segment for sample_id, segment in self._where.items() if sample_id in live}
        if published:
            needed = {*self._where.values(), number}
            self._queue.put(lambda: self._keep(needed))

    def publish(self) -> None:
        """From now on this journal counts, and that of the process before is gone."""
        self._published = True
        final, old = self._path(self._number), self._old
        self._queue.put(lambda: os.replace(final.with_name(final.name + _PART), final))
        self._queue.put(lambda: _remove(old))

    async def written(self) -> None:
        """Wait for all that was noted. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        self._queue.put(lambda: _tell(loop, done))
        deadline = Deadline(f"the journal in {self._directory} to be written", WRITE_S)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await done.wait()
        except TimeoutError:
            deadline.check("the disk does not take it")

    def close(self) -> None:
        """Write what was noted, and end the thread."""
        self._queue.put(None)
        self._thread.join(WRITE_S)

    # --- the thread

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if callable(item):
                    item()
                elif not self._failure:
                    _write(self._descriptor, item)
            except OSError as error:
                self._give_up(error)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self, number: int, published: bool) -> None:
        if self._failure:
            return
        path = self._path(number)
        if not published:
            path = path.with_name(path.name + _PART)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor

    def _keep(self, needed: Container[int]) -> None:
        _remove([path for path in _segments(self._directory) if int(path.stem) not in needed])

    def _give_up(self, error: OSError) -> None:
        if self._failure:
            return
        self._failure = f"{self._directory}: {error.strerror or error}"
        logger.error("the journal of samples is given up (%s): should this process end, the run starts over", error)
        try:
            _remove([*_segments(self._directory), *self._directory.glob(f"*{_PART}")])
        except OSError as again:
            logger.error("what is written of it cannot be removed; remove %s: %s", self._directory, again)

    def _path(self, number: int) -> Path:
        return self._directory / _SEGMENT.format(number)


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(done.set)
    except RuntimeError:
        """The loop is closed: nobody waits any more."""
