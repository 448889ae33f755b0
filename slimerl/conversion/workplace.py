"""The directory in which a conversion takes place, until it is whole and gets the target's name.

    .NAME.converting/           beside the target NAME
    .NAME.converting/.journal   a line for each file that was written, flushed and verified

Flows in: files as they become done. Flows out: the target. Invariants: nothing in the directory is loadable before the
last step; one process at a time works in it; a file that the journal knows, and that has its digest still, is not
written again.
"""

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from slimerl.resharding.hf_checkpoint import CheckpointError, put_in_place
from slimerl.training.checkpoint.directory import Entry, entry_of, flush_directory

JOURNAL = ".journal"


class Done(msgspec.Struct, frozen=True):
    """A finished file. `tensors`: digests of their bytes, by Hugging Face name."""

    file: str
    entry: Entry
    tensors: dict[str, str]


class _Head(msgspec.Struct, frozen=True):
    plan: str


class Workplace:
    """Use it in a `with` statement, which holds the lock."""

    def __init__(self, target: Path, plan: str) -> None:
        """`plan`: a digest of what is to be done; another one makes what was done worthless."""
        self.target, self._plan = target, plan
        self.directory = target.with_name(f".{target.name}.converting")
        self.done: dict[str, Done] = {}
        self._lock = -1

    def __enter__(self) -> "Workplace":
        """Raises CheckpointError where another process works on the same target, OSError where nothing can be
        written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(f"another process converts to {self.target} now; wait for it or end it") from None
        self.done = self._read_journal()
        try:
            for path in self.directory.iterdir():
                # half a file is written again, and takes the room for it
                if not self.done or path.name not in (JOURNAL, *self.done):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not self.done:
                self._append(_Head(self._plan))
        except OSError as error:
            self.__exit__(OSError)
            raise OSError(f"{self.directory} cannot be written: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # a refusal before the first finished file leaves nothing to go on from
        if kind is not None and not self.done:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def record(self, done: Done) -> None:
        """A file is on the disk and was verified. Raises OSError.

        The journal itself is not waited for: a line that a power cut takes costs writing that file again.
        """
        self._append(done)
        self.done[done.file] = done

    def complete(self) -> None:
        """The directory is whole: give it its name. Raises OSError."""
        for path in self.directory.rglob("*"):
            if path.is_dir():
                flush_directory(path)
        flush_directory(self.directory)
        put_in_place(self.directory, self.target)
        # not before: without it all would be written again
        (self.target / JOURNAL).unlink()

    def _append(self, line: msgspec.Struct) -> None:
        with (self.directory / JOURNAL).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read_journal(self) -> dict[str, Done]:
        """What is done of this very plan and is still what it was."""
        try:
            head, *lines = (self.directory / JOURNAL).read_bytes().splitlines()
            if msgspec.json.decode(head, type=_Head).plan != self._plan:
                return {}
        except (OSError, ValueError):
            return {}
        found: dict[str, Done] = {}
        for line in lines:
            try:
                done = msgspec.json.decode(line, type=Done)
                if entry_of(self.directory / done.file) == done.entry:
                    found[done.file] = done
            # the last line of a process that was killed, or a file that is not there any more
            except (OSError, ValueError):
                continue
        return found


def combined_digest(tensors: Mapping[str, str]) -> str:
    """One digest of all tensors, whatever files they lie in."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(dict(tensors), order="sorted"))
