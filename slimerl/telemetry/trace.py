"""Where the time of each process goes: spans of its phases, written as they end, on a clock that all roles share.

Flows in: `span`s around code that runs on one thread, `add`ed spans that may overlap (groups of samples, leases), and
counters. Flows out: RUN_DIR/trace/ROLE-PID.jsonl, which `perfetto.py` merges into one file for a viewer.
    header   {"role", "pid", "wall_ns", "monotonic_ns", "left_out"}: the two clocks, read at the same moment
    span     {"name", "start_ns", "ns", "step"?, "thread" or "lane", "error"?}, on the monotonic clock
    counter  {"counter", "at_ns", "values"}
Invariants: a record is one whole line; a process's files never exceed two halves of `HALF_BYTES` (the oldest half goes,
and the next header says how many records went with it); what cannot be written is given up with a warning, and never
ends a run.

A process has one trace, as it has one log: `start` opens it, and until then every call here does nothing.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TRACE_DIR = "trace"

HALF_BYTES = 8 * 2**20
"""Some 80,000 records; a viewer opens several such files at once without trouble."""


class Trace:
    """The trace of one process; see the module's docstring. Safe to be called from several threads."""

    def __init__(self, run_dir: Path, role: str, half_bytes: int = HALF_BYTES) -> None:
        directory = run_dir / TRACE_DIR
        directory.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        self._role = role
        self._path = directory / f"{role}-{self._pid}.jsonl"
        self._half_bytes = half_bytes
        self._lock = threading.Lock()
        self._steps = threading.local()
        self._records = self._left_out = self._kept_before = 0
        self._open()

    @contextmanager
    def span(self, name: str, step: int | None = None) -> Iterator[None]:
        """Without a step it belongs to that of the span around it."""
        outer = getattr(self._steps, "step", None)
        self._steps.step = step if step is not None else outer
        start, error = time.monotonic_ns(), ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            record = {"name": name, "start_ns": start, "ns": time.monotonic_ns() - start}
            thread = threading.current_thread().name
            self._write(record | {"thread": thread}, self._steps.step, error)
            self._steps.step = outer

    def add(self, name: str, start_s: float, end_s: float, lane: str, step: int | None = None) -> None:
        """A span that has ended, by readings of `time.monotonic`; spans of one lane may overlap."""
        start = round(start_s * 1e9)
        self._write({"name": name, "start_ns": start, "ns": round(end_s * 1e9) - start, "lane": lane}, step)

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Values of now, drawn as a curve."""
        self._write({"counter": name, "at_ns": time.monotonic_ns(), "values": dict(values)})

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("w", encoding="utf-8", buffering=1)
        clocks = {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        header = {"role": self._role, "pid": self._pid, **clocks, "left_out": self._left_out}
        self._bytes = self._file.write(json.dumps(header) + "\n")
        self._records = 0

    def _write(self, record: dict[str, Any], step: int | None = None, error: str = "") -> None:
        # a forked process has this object, but neither this file nor, for certain, this lock
        if os.getpid() != self._pid or self._file.closed:
            return
        line = json.dumps(record | ({"step": step} if step is not None else {}) | ({"error": error} if error else {}))
        try:
            with self._lock:
                self._bytes += self._file.write(line + "\n")
                self._records += 1
                if self._bytes >= self._half_bytes:
                    self._turn_over()
        except OSError as reason:
            logger.warning("%s cannot be written, and the trace ends here: %s", self._path, reason)
            self._abandon()

    def _turn_over(self) -> None:
        """The older half goes."""
        self._file.close()
        self._left_out += self._kept_before
        self._kept_before = self._records
        self._path.replace(self._path.with_suffix(".older.jsonl"))
        self._open()

    def _abandon(self) -> None:
        try:
            self._file.close()
        except OSError:
            logger.debug("the unwritten end of %s is lost", self._path)


_current: Trace | None = None


def start(run_dir: Path, role: str) -> None:
    """Open this process's trace. Where it cannot be opened, a warning says so and there is none."""
    global _current
    stop()
    try:
        _current = Trace(run_dir, role)
    except OSError as error:
        logger.warning("there will be no trace of %s: %s", role, error)


def stop() -> None:
    """Close it; further calls do nothing."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


@contextmanager
def span(name: str, step: int | None = None) -> Iterator[None]:
    """The phase `name` of this thread. Not for coroutines, whose spans would not nest: these `add`."""
    if _current is None:
        yield
        return
    with _current.span(name, step):
        yield


def add(name: str, start_s: float, end_s: float, lane: str, step: int | None = None) -> None:
    """See `Trace.add`."""
    if _current is not None:
        _current.add(name, start_s, end_s, lane, step)


def counter(name: str, values: Mapping[str, float]) -> None:
    """See `Trace.counter`."""
    if _current is not None:
        _current.counter(name, values)
