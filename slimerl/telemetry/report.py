"""The final table of a run, from its record."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from slimerl.telemetry.run_log import EVENTS_FILE, METRICS_FILE, RESIZED, RESTARTED, read_records


def final_table(run_dir: Path, name: str) -> Table:
    """First and last values of what matters and the mean seconds of each phase; empty of rows if nothing ran."""
    records = read_records(run_dir / METRICS_FILE)
    table = Table(title=f"run {name}", title_justify="left")
    for column in ("", "first", "last"):
        table.add_column(column, justify="left" if not column else "right")
    for label, metric, form in (
        ("held-out accuracy", "eval/accuracy", "{:.1%}"),
        ("rollout accuracy", "rollout/accuracy", "{:.1%}"),
        ("loss", "train/loss", "{:.4f}"),
        ("gradient norm", "train/grad_norm", "{:.3f}"),
        ("mean |Δlogprob| engine - trainer", "agreement/mean_abs_logprob_delta", "{:.1e}"),
    ):
        values = series(records, metric)
        if values:
            table.add_row(label, form.format(values[0]), form.format(values[-1]))
    for name in _names(records, "eval/", "_low"):
        ends = [series(records, f"eval/{name}{suffix}") for suffix in ("", "_low", "_high")]
        table.add_row(f"held-out {name.replace('_at_', '@')}, 95 %", *(_interval(ends, at) for at in (0, -1)))
    for name in _names(records, "memory/", "_rss_gib"):
        values = series(records, f"memory/{name}_rss_gib")
        table.add_row(f"memory of {name} (GiB)", f"{values[0]:.2f}", f"{values[-1]:.2f}")
    for name in _names(records, "alarm/"):
        table.add_row(f"alarm {name} (steps)", "", str(len(series(records, f"alarm/{name}"))), style="yellow")
    events = read_records(run_dir / EVENTS_FILE)
    for event, label in ((RESTARTED, "restarts of roles"), (RESIZED, "engines added or removed")):
        if times := sum(each.get("name") == event for each in events):
            table.add_row(label, "", str(times), style="yellow")
    for metric, seconds in phase_seconds(records).items():
        table.add_row(f"{metric.removeprefix('time/')} (mean s per step)", "", f"{seconds:.2f}")
    return table


def _interval(ends: Sequence[Sequence[float]], at: int) -> str:
    value, low, high = (of_all[at] for of_all in ends)
    return f"{value:.1%} ({low:.1%} - {high:.1%})"


def _names(records: Sequence[dict[str, Any]], prefix: str, suffix: str = "") -> list[str]:
    """What stands between prefix and suffix in the names of recorded metrics."""
    names = {name for record in records for name in record if name.startswith(prefix) and name.endswith(suffix)}
    return sorted(name.removeprefix(prefix).removesuffix(suffix) for name in names)


def series(records: Sequence[dict[str, Any]], metric: str) -> list[float]:
    """The metric's values in order of recording."""
    return [record[metric] for record in records if metric in record]


def phase_seconds(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds per step of each `time/…` metric, the first step (warm-up) left out where there are more."""
    steps = [record for record in records if "time/step" in record]
    steps = steps[1:] or steps
    names = {name: None for record in steps for name in record if name.startswith("time/")}
    return {name: fmean(record.get(name, 0.0) for record in steps) for name in names}
