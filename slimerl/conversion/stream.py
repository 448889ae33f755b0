"""The stream of tensors from a source into the files of a target, in threads.

Flows in: a source, a target, a place to work in. Flows out: files that are written, flushed, read back and recorded.
Invariants: a thread holds `BAND_BYTES` (or one row) at a time; at most `FILES_AT_ONCE` files are unfinished; the first
error ends the stream, and what was recorded before it stays.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import xxhash

from slimerl.conversion.files import Bytes, memory_of
from slimerl.conversion.sources import Source
from slimerl.conversion.targets import Reader, Target, TargetFile, flush
from slimerl.conversion.workplace import Done, Workplace
from slimerl.resharding.hf_checkpoint import CheckpointError
from slimerl.training.checkpoint.directory import Entry

BAND_BYTES = 2 * 2**20
"""Read, hashed and written at once: it stays in a CPU's cache."""
TASK_BYTES = 16 * 2**20
FILES_AT_ONCE = 2

Progress = Callable[[str, int], None]
"""Told of bytes that were "converted" or "verified"."""


@dataclass
class _Unfinished:
    file: TargetFile
    waiting: int = 0
    """Tasks of the present stage."""
    digests: dict[str, str] = field(default_factory=dict)
    written: bool = False
    entry: Entry | None = None


_Then = Callable[[_Unfinished, Any], None]


class Stream:
    """Fills all files of `target` that `place` does not know as done."""

    def __init__(
        self,
        source: Source,
        target: Target,
        place: Workplace,
        workers: int,
        progress: Progress,
        recorded: Mapping[str, str],
    ) -> None:
        """`recorded`: digests that tensors of the source must have."""
        self._source, self._target, self._place = source, target, place
        self._progress, self._recorded = progress, recorded
        self._buffers = threading.local()
        self._reader: Reader = target.reader()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        self._disk = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="flush")
        self._tasks: dict[Future[Any], tuple[_Unfinished, _Then]] = {}

    def run(self) -> None:
        """Raises CheckpointError or OSError."""
        waiting = deque(file for file in self._target.files if file.name not in self._place.done)
        for done in self._place.done.values():
            for name in done.tensors:
                for stage in ("converted", "verified"):
                    self._progress(stage, self._source.tensors[name].nbytes)
        unfinished: list[_Unfinished] = []
        try:
            while waiting or self._tasks:
                unfinished = [each for each in unfinished if each.waiting]
                while waiting and len(unfinished) < FILES_AT_ONCE:
                    unfinished.append(self._start(waiting.popleft()))
                finished, _ = wait(self._tasks, return_when=FIRST_COMPLETED)
                for task in finished:
                    of, then = self._tasks.pop(task)
                    then(of, task.result())
                    of.waiting -= 1
                    if of.waiting == 0:
                        self._next_stage(of)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._disk.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, of: _Unfinished, work: Callable[[], Any], then: "_Then") -> None:
        of.waiting += 1
        self._tasks[pool.submit(work)] = of, then

    def _start(self, file: TargetFile) -> _Unfinished:
        self._target.create(file)
        of = _Unfinished(file)
        for names in self._portions(file.tensors):
            self._submit(self._pool, of, partial(self._convert_all, names), lambda of, found: of.digests.update(found))
        return of

    def _portions(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Tasks large enough that handing them out takes no time."""
        portion: list[str] = []
        size = 0
        for name in names:
            portion.append(name)
            size += self._source.tensors[name].nbytes
            if size >= TASK_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    def _next_stage(self, of: _Unfinished) -> None:
        if not of.written:
            of.written = True
            self._target.seal(of.file)
            # waiting for the disk takes no core
            self._submit(self._disk, of, partial(flush, self._place.directory, of.file.name), lambda _, __: None)
            self._submit(self._pool, of, partial(self._verified, of), _keep_entry)
        else:
            assert of.entry is not None
            self._place.record(Done(of.file.name, of.entry, of.digests))
            self._target.release(of.file)

    def _convert_all(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self._convert(name) for name in names}

    def _convert(self, name: str) -> str:
        def write(first: int, data: Bytes) -> None:
            self._target.write(name, first, data)
            self._progress("converted", len(data))

        stored = self._source.tensors[name]
        digest = digest_of(self._source, name, self._buffer(stored.row_bytes), write)
        if self._recorded.get(name, digest) != digest:
            raise CheckpointError(
                f"{name} has digest {digest} where the source should have {self._recorded[name]}: it is damaged; use a "
                "copy, or convert it anew"
            )
        return digest

    def _verified(self, of: _Unfinished) -> Entry:
        """Read a file back, once, for its own digest and for those of its tensors."""
        path = self._place.directory / of.file.name
        whole, tensors = xxhash.xxh3_128(), {name: xxhash.xxh3_128() for name in of.file.tensors}
        ranges = sorted((found.offset, found.nbytes, name) for name in tensors for found in self._reader.ranges(name))
        buffer, at = self._buffer(0), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memory_of(buffer)):
                band = memory_of(buffer)[:count]
                whole.update(band)
                self._progress("verified", _hash_tensors(tensors, ranges, band, at))
                at += count
        for name, digest in tensors.items():
            if digest.hexdigest() != of.digests[name]:
                path.unlink()
                raise CheckpointError(
                    f"{path}: {name} has digest {digest.hexdigest()} where the source has {of.digests[name]}; the disk "
                    "does not give back what was written"
                )
        return Entry(at, whole.hexdigest())

    def _buffer(self, row_bytes: int) -> Bytes:
        """Of this thread, for at least a row."""
        wanted = max(BAND_BYTES, row_bytes)
        kept = getattr(self._buffers, "bytes", None)
        if kept is None or len(kept) < wanted:
            kept = self._buffers.bytes = np.empty(wanted, np.uint8)
        return kept


def digest_of(source: Source, name: str, buffer: Bytes, then: Callable[[int, Bytes], None] = lambda _, __: None) -> str:
    """XXH3 of a tensor's bytes, read through `buffer`, which holds a row at least; `then` gets (first row, bytes) of
    each band."""
    stored = source.tensors[name]
    digest = xxhash.xxh3_128()
    height = max(1, len(buffer) // max(1, stored.row_bytes))
    for first in range(0, stored.rows, height):
        last = min(first + height, stored.rows)
        band = buffer[: (last - first) * stored.row_bytes]
        source.read(name, first, last, band)
        digest.update(memory_of(band))
        then(first, band)
    return digest.hexdigest()


def _hash_tensors(tensors: Mapping[str, Any], ranges: list[tuple[int, int, str]], band: memoryview, at: int) -> int:
    """Give each tensor its bytes of a band that begins at byte `at` of the file; returns how many there were.

    Ranges are (offset, bytes, tensor), sorted: the rows of a tensor lie in a file in their order.
    """
    taken = 0
    for offset, nbytes, name in ranges[max(0, bisect_right(ranges, at, key=itemgetter(0)) - 1) :]:
        first, last = max(offset, at), min(offset + nbytes, at + len(band))
        if offset >= at + len(band):
            break
        if first < last:
            tensors[name].update(band[first - at : last - at])
            taken += last - first
    return taken


def _keep_entry(of: _Unfinished, entry: Entry) -> None:
    of.entry = entry
