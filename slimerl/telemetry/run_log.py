"""The record of a run, written by trainer rank 0 and read by everyone else.

Flows out, in the run directory:
    metrics.jsonl   one object per `metrics` call: {"step", "time", …values}
    events.jsonl    one object per phase start and end: {"step", "phase", "edge", "time", "seconds"?},
                    and per alarm or note: {"step", "edge": "alarm" or "note", "name", "text", "time"}
    tensorboard/    the same values as scalars

Invariant: a record is one whole line; a reader never sees half of one as valid (`read_records`).
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
RESTARTED = "restarted"
"""Name of the events of roles that were started again."""
RESIZED = "engines changed"
"""Name of the events of engines that were added or removed."""


class RunLog:
    """Writes the record of one run."""

    def __init__(self, run_dir: Path, after_step: int | None = None) -> None:
        """Args: `after_step`: the run goes on after this step, and metrics of later ones, which are done again, go;
        None: append."""
        from torch.utils.tensorboard import SummaryWriter  # 1 s to import; only the writing rank needs it

        run_dir.mkdir(parents=True, exist_ok=True)
        if after_step is not None:
            _keep_until(run_dir / METRICS_FILE, after_step)
        self._metrics = _open_lines(run_dir / METRICS_FILE)
        self._events = _open_lines(run_dir / EVENTS_FILE)
        purge_step = None if after_step is None else after_step + 1
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` (names like `train/loss`) of `step`."""
        _write(self._metrics, {"step": step, "time": time.time(), **values})
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Mark that the run is in `name`, and for how long; an exception leaves the phase open on purpose:
        the report then says where the run stood."""
        start = time.monotonic()
        _write(self._events, {"step": step, "phase": name, "edge": "start", "time": time.time()})
        yield
        seconds = time.monotonic() - start
        _write(self._events, {"step": step, "phase": name, "edge": "end", "time": time.time(), "seconds": seconds})

    def event(self, step: int, kind: str, name: str, text: str) -> None:
        """Record what happened in `step`, and write it to the log. Args: `kind`: "alarm", a warning, or "note"."""
        _write(self._events, {"step": step, "edge": kind, "name": name, "text": text, "time": time.time()})
        logger.log(logging.WARNING if kind == "alarm" else logging.INFO, "step %d: %s: %s", step, name, text)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        self._board.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class RecordDamaged(ValueError):
    """A line of a record is none; names file and line."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a .jsonl file; an unfinished last line is left out. Missing file: no records.

    Raises RecordDamaged.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordDamaged(f"{path} cannot be read: {error}") from None
    whole = data[: data.rfind(b"\n") + 1]
    return [_record(path, number, line) for number, line in enumerate(whole.splitlines(), start=1)]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RecordDamaged(f"{path}, line {number} is no record ({error}); remove the line, or the file") from None
    if not isinstance(record, dict):
        raise RecordDamaged(f"{path}, line {number} is no record; remove the line, or the file")
    return record


def exported(events: Sequence[Mapping[str, Any]]) -> bool:
    """Do the events of a run say that it wrote its model, and so came to its end?"""
    return any(event.get("phase") == "export" and event.get("edge") == "end" for event in events)


def newest_step(run_dir: Path) -> int:
    """Of the metrics recorded; -1: there are none. Raises RecordDamaged."""
    return max((record["step"] for record in _read_steps(run_dir / METRICS_FILE)), default=-1)


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Have the weights after a step figures of their evaluation? Raises RecordDamaged."""
    of_step = [record for record in _read_steps(run_dir / METRICS_FILE) if record["step"] == step]
    return any(name.startswith("eval/") for record in of_step for name in record)


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Records that each belong to a step. Raises RecordDamaged."""
    records = read_records(path)
    if strays := [number for number, each in enumerate(records, start=1) if type(each.get("step")) is not int]:
        raise RecordDamaged(f"{path}, line {strays[0]} belongs to no step; remove the line, or the file")
    return records


def append_event(run_dir: Path, step: int, kind: str, name: str, text: str, alone: bool = False) -> None:
    """`RunLog.event` of a process that is not the writer of the record: one whole line at the end.

    Args: `alone`: the writer has ended; a last line that it left torn is cut off.
    """
    record = {"step": step, "edge": kind, "name": name, "text": text, "time": time.time()}
    path = run_dir / EVENTS_FILE
    with _open_lines(path) if alone else path.open("a", encoding="utf-8") as file:
        _write(file, record)


def _keep_until(path: Path, step: int) -> None:
    """Leave out the records of later steps, in a new file: readers see the one or the other."""
    kept = [record for record in _read_steps(path) if record["step"] <= step]
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    part.replace(path)


def _open_lines(path: Path) -> TextIO:
    """Open for appending; a torn last line (the writer was killed) is ended, so that the next record is whole."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    if torn:
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return path.open("a", encoding="utf-8", buffering=1)


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
