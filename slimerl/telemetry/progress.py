"""The live view of a run: a bar over the steps, the phase it is in, the last figures. Reads the run's record.

Flows in: `events.jsonl` and `metrics.jsonl` of the run directory, as they grow. Flows out: the terminal.
Where standard output is no terminal, one plain line per step is printed instead.
"""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slimerl.telemetry.run_log import EVENTS_FILE, METRICS_FILE

SHOWN = (
    ("rollout/accuracy", "accuracy", "{:.1%}"),
    ("eval/accuracy", "held-out", "{:.1%}"),
    ("train/loss", "loss", "{:.4f}"),
    ("train/grad_norm", "grad norm", "{:.3f}"),
    ("agreement/mean_abs_logprob_delta", "|Δlogprob|", "{:.1e}"),
    ("time/step", "step", "{:.1f} s"),
)
"""Metric, its label, its format: what one line of progress says."""


class Tail:
    """New whole records of a growing .jsonl file; of one that is replaced (a run goes on from a checkpoint), all."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        # behind the last whole line: a torn one after it is cut off by the next writer
        self._offset = path.read_bytes().rfind(b"\n") + 1 if from_end and path.exists() else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inode not in (None, inode):
                self._offset = 0
            self._inode = inode
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


class ProgressView:
    """`update()` now and then; it draws what is new since the last call."""

    def __init__(self, run_dir: Path, steps: int, console: Console) -> None:
        self._console, self._steps = console, steps
        self._first: dict[str, Any] | None = None
        self._newest = 0
        self._events = Tail(run_dir / EVENTS_FILE, from_end=True)
        self._metrics = Tail(run_dir / METRICS_FILE, from_end=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=steps, figures="")

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._bar.stop()

    def describe(self, what: str) -> None:
        """Say what the run is doing before the first step."""
        self._bar.update(self._task, description=what)

    def update(self) -> None:
        for event in self._events.new():
            if event["edge"] == "start":
                self._bar.update(self._task, description=event["phase"])
            elif event["edge"] == "alarm":
                text = f"step {event['step']:>4}  {event['name']}: {event['text']}"
                self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        for record in self._metrics.new():
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        figures = figures_line(record)
        if "train/loss" in record:
            self._bar.update(self._task, completed=record["step"], figures=figures)
        if figures and not self._console.is_terminal:
            line = f"step {record['step']:>4}/{self._steps}  {figures}{self._left(record)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _left(self, record: dict[str, Any]) -> str:
        """The time that the remaining steps take if they are as long as those since this view began."""
        if self._first is None:
            self._first = record
        done = record["step"] - self._first["step"]
        if done <= 0 or record["step"] < self._newest:
            return ""  # of an evaluation that went on beside later steps: how far the run is, those have said
        self._newest = record["step"]
        seconds = (record["time"] - self._first["time"]) / done * (self._steps - record["step"])
        return f"  left {timedelta(seconds=round(seconds))}"


def figures_line(record: dict[str, Any]) -> str:
    """The figures of one metrics record that `SHOWN` names, as `label value  label value`."""
    return "  ".join(f"{label} {form.format(record[name])}" for name, label, form in SHOWN if name in record)
