"""The record of a run, written by trainer rank 0 and read by everyone else.

Flows out, in the run directory:
    metrics.jsonl   one object per `metrics` call: {"step", "time", …values}
    events.jsonl    one object per phase start and end: {"step", "phase", "edge", "time", "seconds"?}
    tensorboard/    the same values as scalars

Invariant: a record is one whole line; a reader never sees half of one as valid (`read_records`).
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class RunLog:
    """Writes the record of one run. A resumed run appends."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 1 s to import; only the writing rank needs it

        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_lines(run_dir / METRICS_FILE)
        self._events = _open_lines(run_dir / EVENTS_FILE)
        self._board = SummaryWriter(str(run_dir / "tensorboard"))

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

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        self._board.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a .jsonl file; an unfinished last line is left out. Missing file: no records."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _open_lines(path: Path) -> TextIO:
    """Open for appending; a torn last line (the writer was killed) is ended, so that the next record is whole."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    if torn:
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
    return path.open("a", encoding="utf-8", buffering=1)


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")
