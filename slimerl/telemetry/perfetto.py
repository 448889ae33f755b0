"""The traces of all roles as one file in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.

Flows in: RUN_DIR/trace/*.jsonl (`trace.py`). Flows out: RUN_DIR/trace.json.
Invariants: times are microseconds since the first event, in order; every process and thread has a name; two spans of
one thread are nested or apart (spans of a lane that overlap are dealt to threads "lane 1", "lane 2", …).

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimerl.telemetry.run_log import RecordDamaged, read_records
from slimerl.telemetry.trace import TRACE_DIR

TRACE_FILE = "trace.json"

ORDER = ("conductor", "rollout", "engine", "trainer")
"""Roles from top to bottom."""


class TraceError(ValueError):
    """There is nothing to merge, or a file is no trace; names it."""


@dataclass(frozen=True)
class Span:
    """`start_us`: microseconds since the epoch."""

    process: str
    thread: str
    lane: str
    name: str
    start_us: float
    us: float
    step: int | None = None
    error: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


@dataclass(frozen=True)
class Counter:
    process: str
    name: str
    at_us: float
    values: dict[str, float]


@dataclass(frozen=True)
class Recorded:
    """`left_out`: records that were dropped to bound the files."""

    spans: list[Span]
    counters: list[Counter]
    left_out: int


def read_trace(run_dir: Path) -> Recorded:
    """What every process of the run recorded. Raises TraceError."""
    files = sorted((run_dir / TRACE_DIR).glob("*.jsonl"))
    if not files:
        raise TraceError(f"{run_dir / TRACE_DIR} holds no trace; has the run started a role?")
    spans: list[Span] = []
    counters: list[Counter] = []
    left_out: dict[str, int] = defaultdict(int)
    for file in files:
        try:
            records = read_records(file)
        except RecordDamaged as error:
            raise TraceError(str(error)) from None
        if not records:
            continue  # its process ended before the header was written
        header = records[0]
        if not {"role", "pid", "wall_ns", "monotonic_ns", "left_out"} <= header.keys():
            raise TraceError(f"{file}: the first line is no header of a trace; remove the file")
        process = f"{header['role']} ({header['pid']})"
        left_out[process] = max(left_out[process], header["left_out"])
        offset_ns = header["wall_ns"] - header["monotonic_ns"]
        for number, record in enumerate(records[1:], start=2):
            try:
                if "counter" in record:
                    at_us = (record["at_ns"] + offset_ns) / 1e3
                    counters.append(Counter(process, record["counter"], at_us, record["values"]))
                else:
                    spans.append(_span(process, record, offset_ns))
            except (KeyError, TypeError):
                raise TraceError(f"{file}, line {number} is neither span nor counter; remove the line") from None
    return Recorded(sorted(spans, key=lambda span: (span.start_us, -span.us)), counters, sum(left_out.values()))


def _span(process: str, record: dict[str, Any], offset_ns: int) -> Span:
    return Span(
        process,
        record.get("thread", ""),
        record.get("lane", ""),
        record["name"],
        (record["start_ns"] + offset_ns) / 1e3,
        record["ns"] / 1e3,
        record.get("step"),
        record.get("error", ""),
    )


def write_trace(run_dir: Path) -> Path:
    """Merge the traces of a run, also of one that still goes on. Raises TraceError."""
    path = run_dir / TRACE_FILE
    part = path.with_suffix(".part")
    part.write_text(json.dumps(chrome_trace(read_trace(run_dir))), encoding="utf-8")
    part.replace(path)
    return path


def chrome_trace(recorded: Recorded) -> dict[str, Any]:
    """The JSON object of the format."""
    starts = [span.start_us for span in recorded.spans] + [counter.at_us for counter in recorded.counters]
    origin = min(starts, default=0.0)
    named = {span.process for span in recorded.spans} | {counter.process for counter in recorded.counters}
    processes = sorted(named, key=_place)
    numbers = {process: number for number, process in enumerate(processes, start=1)}
    events: list[dict[str, Any]] = []
    for process, number in numbers.items():
        own = [span for span in recorded.spans if span.process == process]
        events += _process_events(process, number, own, origin)
    events += [
        {"ph": "C", "name": each.name, "pid": numbers[each.process], "ts": each.at_us - origin, "args": each.values}
        for each in recorded.counters
    ]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), -event.get("dur", 0.0)))
    other = {"start_us_since_epoch": origin, "records_left_out": recorded.left_out}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _process_events(process: str, number: int, spans: list[Span], origin: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    for tid, (thread, of_thread) in enumerate(_threads(spans).items(), start=1):
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": thread}}
        for span in of_thread:
            arguments = {"step": span.step, "error": span.error or None}
            yield {
                "ph": "X",
                "name": span.name,
                "cat": process.partition(" ")[0],
                "ts": span.start_us - origin,
                "dur": span.us,
                "pid": number,
                "tid": tid,
                "args": {key: value for key, value in arguments.items() if value is not None},
            }


def _threads(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by the thread on which they are drawn, given in order of their start."""
    drawn: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if not span.lane:
            drawn[span.thread].append(span)
            continue
        number = 1
        while (earlier := drawn[f"{span.lane} {number}"]) and earlier[-1].end_us > span.start_us:
            number += 1
        drawn[f"{span.lane} {number}"].append(span)
    return dict(drawn)


def _place(process: str) -> tuple[int, int, str]:
    role = process.partition(" ")[0]
    kind, _, number = role.partition("@")[0].partition("-")
    return ORDER.index(kind) if kind in ORDER else len(ORDER), int(number) if number.isdigit() else 0, process
