"""What a run recorded: held-out accuracy before and after, seconds per step by phase, a metric's curve."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimerl.telemetry import read_records
from slimerl.telemetry.curve import text_curve
from slimerl.telemetry.report import final_table
from slimerl.telemetry.run_log import METRICS_FILE, RecordDamaged

ACCURACY = "rollout/accuracy"
"""Runs without rollouts (supervised fine-tuning) have none; then only the table is shown."""


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, e.g. runs/quickstart.")],
    metric: Annotated[str, typer.Option(help="Which metric to draw.")] = ACCURACY,
) -> None:
    """Print the table and the curve of RUN_DIR."""
    console = Console(width=100, markup=False)
    try:
        records = read_records(run_dir / METRICS_FILE)
        table = final_table(run_dir, run_dir.name)
    except RecordDamaged as error:
        raise typer.BadParameter(str(error)) from None
    if not records:
        raise typer.BadParameter(f"no step of a run is recorded in {run_dir / METRICS_FILE}")
    drawn = [record for record in records if math.isfinite(record.get(metric, math.nan))]
    if not drawn and metric != ACCURACY:
        recorded = ", ".join(sorted({name for record in records for name in record}))
        raise typer.BadParameter(f"{run_dir} has no finite value of a metric '{metric}'; it has {recorded}")
    console.print(table)
    evaluated = [record for record in records if "eval/accuracy" in record]
    if evaluated:
        points = "  ".join(f"{record['step']}: {record['eval/accuracy']:.1%}" for record in evaluated)
        console.print(f"held-out accuracy by step  {points}")
    if drawn:
        console.print(metric)
        console.print(text_curve([record["step"] for record in drawn], [record[metric] for record in drawn]))


if __name__ == "__main__":
    typer.run(main)
