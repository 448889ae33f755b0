"""Is a long run flat? Memory, file descriptors and threads of each role, and the seconds of a step.

    python tools/soak.py configs/quickstart.yaml --steps 200
    python tools/soak.py --record runs/quickstart            # of a run that has been

The first fifth warms up and is left out. Of the rest the median slope over all pairs of steps (Theil–Sen) is taken, so
that a jump, an evaluation or a busy moment of the machine are no growth. Exit code 1: something grows.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slimerl.resilience.tied import tied_command
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE, RecordDamaged
from slimerl.telemetry.slopes import robust_slope

WARM_UP = 0.2
LEAST_STEPS = 10


@dataclass(frozen=True)
class Limit:
    """Over the steps that are looked at, a figure may grow by `share` of its median or by `floor`, whichever is more.

    `reason`: why no less.
    """

    suffix: str
    share: float
    floor: float
    reason: str


LIMITS = (
    Limit("_heap_gib", 0.02, 0.01, "what the role's own process has in use after a step: nothing of the step stays"),
    Limit("_rss_gib", 0.02, 0.02, "an allocator keeps some pages more; 20 MiB is less than a batch"),
    Limit("_cuda_allocated_gib", 0.01, 0.01, "the caching allocator's live tensors are the same in every step"),
    Limit("_fds", 0.0, 2.0, "a connection may be open at the moment of looking"),
    Limit("_threads", 0.0, 2.0, "pools grow to their size in the warm-up"),
    Limit("time/step", 0.1, 0.0, "policies that learn answer at other lengths, and machines are shared"),
)


@dataclass(frozen=True)
class Verdict:
    """`grown`: by the slope, over all the steps that were looked at."""

    figure: str
    median: float
    grown: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.grown <= self.allowed


def main(
    spec: Annotated[Path | None, typer.Argument(metavar="[SPEC]", help="Run spec.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="Length of the run.")] = 200,
    out: Annotated[Path, typer.Option(help="Of the run; an earlier record is replaced.")] = Path("runs/soak"),
    record: Annotated[Path | None, typer.Option(help="Look at this run's directory instead of running.")] = None,
) -> None:
    """Run SPEC for many steps and say of each figure whether it is flat."""
    if (spec is None) == (record is None):
        raise typer.BadParameter("give either a SPEC to run, or the --record of a run that has been")
    if spec is not None:
        _run(spec, [*(overrides or ()), f"training.steps={steps}"], out)
    try:
        verdicts = judge(read_records((record or out) / METRICS_FILE))
    except RecordDamaged as error:
        raise typer.BadParameter(str(error)) from None
    Console(width=None if sys.stdout.isatty() else 100).print(verdict_table(verdicts))
    raise typer.Exit(0 if all(verdict.flat for verdict in verdicts) else 1)


def _run(spec: Path, overrides: Sequence[str], out: Path) -> None:
    own = [f"output_dir={out}", f"training.export_path={out / 'model'}", "--fresh"]
    done = subprocess.run(tied_command([sys.executable, "-m", "slimerl.cli", "run", str(spec), *overrides, *own]))
    if done.returncode:
        raise typer.Exit(done.returncode)


def judge(records: Sequence[dict[str, Any]]) -> list[Verdict]:
    """One verdict for each figure that has a limit. Raises BadParameter for a run that is too short."""
    steps = [record for record in records if "time/step" in record]
    if len(steps) < LEAST_STEPS:
        raise typer.BadParameter(f"{len(steps)} steps are recorded; {LEAST_STEPS} are the least that a slope needs")
    return list(_verdicts(steps[round(len(steps) * WARM_UP) :]))


def _verdicts(steps: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    for limit in LIMITS:
        for name in sorted({name for record in steps for name in record if name.endswith(limit.suffix)}):
            points = [(record["step"], record[name]) for record in steps if name in record]
            numbers, values = zip(*points, strict=True)
            grown = robust_slope(numbers, values) * (numbers[-1] - numbers[0])
            usual = median(values)
            yield Verdict(name, usual, grown, max(limit.floor, limit.share * usual))


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="flatness", title_justify="left")
    for column in ("", "median", "grown", "allowed", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for each in verdicts:
        figures = (f"{value:.3f}" for value in (each.median, each.grown, each.allowed))
        table.add_row(each.figure, *figures, "flat" if each.flat else "GROWS", style="" if each.flat else "red")
    return table


if __name__ == "__main__":
    typer.run(main)
