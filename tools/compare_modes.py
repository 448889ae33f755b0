"""Synchronous, one step off and asynchronous training of one spec side by side.

    python tools/compare_modes.py configs/quickstart.yaml
    python tools/compare_modes.py configs/quickstart.yaml --tail-s 0.5 --out runs/modes-tail
    python tools/compare_modes.py SPEC --staleness 0 --staleness 8 algorithm.correction=token_tis

One run for each `rollout.max_staleness`, in OUT/staleness-N; what has been run is not run again. Reported, and kept in
OUT/comparison.json: seconds from the first weights until the held-out accuracy that all of them reached, the versions
that trained tokens were behind, the share of the time in which the trainer waited for samples and engines had no
request, and how far engine and trainer agree about the first batch.

`--tail-s` makes the tail of a rollout heavy: rewards come from a service on this machine whose answers take as long as
a Pareto law of that mean says, the same for a sample in every mode.

Exit code 1: a run failed, or at staleness 0 the mean ratio trainer / engine of the first batch is not 1.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from slow_rewards import serve
from variants import Variant, run_variants

from slimerl.spec import SpecError, load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.report import series
from slimerl.telemetry.run_log import METRICS_FILE

COMPARISON_FILE = "comparison.json"
WARM_UP_STEPS = 2
"""Left out of shares and histograms: asynchronous runs have no backlog yet."""
RATIO_WITHIN = {"fp32": 1e-3, "bf16": 0.1}
"""Of 1. The mean over a batch; log-probabilities differ by about 1e-6, and by some hundredths."""
BEHIND = "staleness/tokens_behind_"
MAX_TAIL_CONCURRENCY = 4096


def main(
    spec: Path,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    staleness: Annotated[list[int] | None, typer.Option(min=0, help="Default: 0, 1 and 4.")] = None,
    tail_s: Annotated[float, typer.Option(min=0, help="Mean seconds of a reward; 0: rewards as in SPEC.")] = 0.0,
    tail_shape: Annotated[float, typer.Option(min=1.05, help="Of the Pareto law; the smaller the heavier.")] = 1.5,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 5,
    accuracy: Annotated[float | None, typer.Option(help="To be reached; default: what all modes reach.")] = None,
    out: Annotated[Path, typer.Option(help="Of the runs and the comparison.")] = Path("runs/modes"),
) -> None:
    """Run SPEC with each staleness and compare."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    modes = staleness or [0, 1, 4]
    variants = [Variant(f"staleness-{each}", (f"rollout.max_staleness={each}",)) for each in modes]
    own = [f"evaluation.every_steps={evaluate_every}", "checkpoint.every_steps=0", *(overrides or ())]
    try:
        with _rewards(tail_s, tail_shape) as tail:
            given = [*own, *tail]
            dtype = load_spec(spec, given).model.dtype
            results, problems = run_variants(spec, given, variants, out, lambda _, run_dir: figures(run_dir), console)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    compared = compare(results, accuracy)
    problems += unequal_ratio(results, RATIO_WITHIN[dtype])
    (out / COMPARISON_FILE).write_text(json.dumps({"modes": compared, "problems": problems}, indent=1) + "\n")
    console.print(comparison_table(compared))
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    raise typer.Exit(1 if problems else 0)


@contextmanager
def _rewards(mean_s: float, shape: float) -> Iterator[list[str]]:
    """The overrides that bring rewards from a service that takes its time; none for 0. The port is the same in every
    session, so that a record of another one is recognised as one of the same spec."""
    if not mean_s:
        yield []
        return
    with serve(mean_s, shape) as url:
        yield [tail_override(url)]


def tail_override(url: str) -> str:
    """The whole section at once: the keys of another kind would not be read."""
    return f"reward={{kind: http, url: '{url}', timeout_s: 600, concurrency: {MAX_TAIL_CONCURRENCY}}}"


def figures(run_dir: Path) -> dict[str, Any]:
    """Of one run."""
    records = read_records(run_dir / METRICS_FILE)
    steps = [record for record in records if "time/step" in record]
    settled = steps[WARM_UP_STEPS:] or steps
    begun = records[0]["time"]
    evaluated = [record for record in records if "eval/accuracy" in record]
    total_s = sum(record["time/step"] for record in settled)
    return {
        "accuracy": [[record["step"], record["time"] - begun, record["eval/accuracy"]] for record in evaluated],
        "seconds": records[-1]["time"] - begun,
        "step_s": total_s / len(settled),
        "trainer_idle": sum(record.get("time/wait", 0.0) for record in settled) / total_s,
        "engines_idle": fmean(series(settled, "rollout/engine_idle_share")),
        "tokens_behind": tokens_behind(settled),
        "rollout_seconds": fmean(series(settled, "rollout/seconds")),
        "first_ratio": steps[0]["agreement/mean_ratio"],
        "mean_ratio": fmean(series(settled, "agreement/mean_ratio")),
    }


def tokens_behind(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Share of the trained tokens by the versions that they were behind."""
    tokens = sum(record["rollout/generated_tokens"] for record in steps)
    counts: dict[int, float] = {}
    for record in steps:
        for name in (name for name in record if name.startswith(BEHIND)):
            behind = int(name.removeprefix(BEHIND))
            counts[behind] = counts.get(behind, 0.0) + record[name] * record["rollout/generated_tokens"]
    return {str(behind): counts[behind] / tokens for behind in sorted(counts)}


def compare(results: Mapping[str, Mapping[str, Any]], accuracy: float | None) -> dict[str, dict[str, Any]]:
    """The figures, with the seconds until the accuracy that was asked for, or the highest that all reached."""
    if not results:
        return {}
    best = {name: max(point[2] for point in each["accuracy"]) for name, each in results.items()}
    wanted = min(best.values()) if accuracy is None else accuracy
    return {
        name: {**each, "wanted_accuracy": wanted, "seconds_to_accuracy": seconds_to(each["accuracy"], wanted)}
        for name, each in results.items()
    }


def seconds_to(points: Sequence[Sequence[float]], wanted: float) -> float | None:
    """Until the accuracy is first `wanted`, linear between evaluations; None: it never is.

    Args: `points`: (step, seconds, accuracy), in order.
    """
    if points and points[0][2] >= wanted:
        return points[0][1]
    for (_, before_s, before), (_, after_s, after) in pairwise(points):
        if after >= wanted:
            return before_s + (after_s - before_s) * (wanted - before) / (after - before)
    return None


def unequal_ratio(results: Mapping[str, Mapping[str, Any]], within: float) -> list[str]:
    """What is wrong with the first batch of the synchronous run."""
    ratio = results.get("staleness-0", {}).get("first_ratio", 1.0)
    if abs(ratio - 1) <= within:
        return []
    return [f"staleness-0: the mean ratio trainer / engine of the first batch is {ratio:.6f}, and not 1"]


def comparison_table(compared: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="modes", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in compared:
        table.add_column(name, justify="right", no_wrap=True)
    wanted = next((each["wanted_accuracy"] for each in compared.values()), 0.0)

    def row(label: str, cells: Iterator[str]) -> None:
        table.add_row(label, *cells)

    modes = list(compared.values())
    reached = ((each["seconds_to_accuracy"], each) for each in modes)
    row(f"s to {wanted:.1%} held-out", (f"{s:.1f}" if s is not None else "never" for s, _ in reached))
    row("best held-out accuracy", (f"{max(point[2] for point in each['accuracy']):.1%}" for each in modes))
    row("s per step", (f"{each['step_s']:.2f}" for each in modes))
    row("trainer waits", (f"{each['trainer_idle']:.0%}" for each in modes))
    row("engines idle", (f"{each['engines_idle']:.0%}" for each in modes))
    row("first batch, trainer / engine", (f"{each['first_ratio']:.6f}" for each in modes))
    row("all batches, trainer / engine", (f"{each['mean_ratio']:.4f}" for each in modes))
    for behind in sorted({behind for each in modes for behind in each["tokens_behind"]}, key=int):
        row(f"tokens {behind} behind", (f"{each['tokens_behind'].get(behind, 0.0):.1%}" for each in modes))
    return table


if __name__ == "__main__":
    typer.run(main)
