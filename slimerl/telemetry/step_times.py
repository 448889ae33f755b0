"""Seconds of each phase in each step, of every role, from the trace of a run.

Flows in: RUN_DIR/trace. Flows out: `Phase`s in the order in which they happen. A phase inside another has its path
("train › optimizer") and follows it; of several ranks of a role the slowest counts, phases that overlap count from the
first start to the last end.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from slimerl.telemetry.perfetto import Span, read_trace

INSIDE = " › "


@dataclass(frozen=True)
class Phase:
    """`seconds`: by step."""

    role: str
    path: str
    seconds: dict[int, float]

    def of(self, steps: Sequence[int]) -> list[float]:
        """One value for each step; 0 where the phase did not occur."""
        return [self.seconds.get(step, 0.0) for step in steps]


def phases(run_dir: Path) -> list[Phase]:
    """Every phase that belongs to a step; what comes before the first has step 0 or none. Raises TraceError."""
    by_process: dict[str, list[Span]] = defaultdict(list)
    for span in read_trace(run_dir).spans:
        if span.step:
            by_process[span.process].append(span)
    merged: dict[tuple[str, str], dict[int, float]] = {}
    for process, spans in by_process.items():
        role = process.partition(" ")[0].partition("-")[0]
        for path, seconds in _of_process(spans).items():
            slowest = merged.setdefault((role, path), {})
            for step, value in seconds.items():
                slowest[step] = max(value, slowest.get(step, 0.0))
    first = {key: number for number, key in enumerate(merged)}

    def place(key: tuple[str, str]) -> list[int]:
        """After the phase around it, by the order in which they were first seen."""
        role, path = key
        parts = path.split(INSIDE)
        return [first[role, INSIDE.join(parts[:depth])] for depth in range(1, len(parts) + 1)]

    return [Phase(*key, merged[key]) for key in sorted(merged, key=place)]


def _of_process(spans: Sequence[Span]) -> dict[str, dict[int, float]]:
    """Path → step → seconds, of spans in order of their start."""
    found: dict[str, dict[int, float]] = {}
    overlapping: dict[tuple[str, int], list[Span]] = defaultdict(list)
    open_spans: dict[str, list[tuple[Span, str]]] = defaultdict(list)
    for span in spans:
        step = span.step or 0
        if span.lane:
            found.setdefault(span.name, {})
            overlapping[span.name, step].append(span)
            continue
        around = open_spans[span.thread]
        while around and around[-1][0].end_us < span.end_us:
            around.pop()
        path = around[-1][1] + INSIDE + span.name if around else span.name
        around.append((span, path))
        seconds = found.setdefault(path, {})
        seconds[step] = seconds.get(step, 0.0) + span.us / 1e6
    for (name, step), together in overlapping.items():
        found[name][step] = (max(each.end_us for each in together) - together[0].start_us) / 1e6
    return found


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of one value)."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
