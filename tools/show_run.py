"""What a run recorded: held-out accuracy before and after, seconds per step by phase, the accuracy's curve."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slimerl.telemetry import read_records
from slimerl.telemetry.curve import text_curve
from slimerl.telemetry.perfetto import write_trace
from slimerl.telemetry.report import final_table
from slimerl.telemetry.run_log import METRICS_FILE

ACCURACY = "rollout/accuracy"
"""Runs without rollouts (supervised fine-tuning) have none; then only the table is shown."""


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, e.g. runs/quickstart.")],
    metric: Annotated[str, typer.Option(help="Which metric to draw; a value between 0 and 1.")] = ACCURACY,
    trace: Annotated[bool, typer.Option("--trace", help="Merge the traces of all roles, also while it runs.")] = False,
) -> None:
    """Print the table and the curve of RUN_DIR."""
    console = Console(width=100)
    if trace:
        console.print(f"{write_trace(run_dir)}: open it in https://ui.perfetto.dev", soft_wrap=True)
        return
    records = read_records(run_dir / METRICS_FILE)
    if not records:
        raise typer.BadParameter(f"no step of a run is recorded in {run_dir / METRICS_FILE}")
    drawn = [record for record in records if metric in record]
    if not drawn and metric != ACCURACY:
        recorded = ", ".join(sorted({name for record in records for name in record}))
        raise typer.BadParameter(f"{run_dir} has no metric '{metric}'; it has {recorded}")
    console.print(final_table(run_dir, run_dir.name))
    evaluated = [record for record in records if "eval/accuracy" in record]
    if evaluated:
        points = "  ".join(f"{record['step']}: {record['eval/accuracy']:.1%}" for record in evaluated)
        console.print(f"held-out accuracy by step  {points}")
    if drawn:
        console.print(metric)
        console.print(text_curve([record["step"] for record in drawn], [record[metric] for record in drawn]))


if __name__ == "__main__":
    typer.run(main)
