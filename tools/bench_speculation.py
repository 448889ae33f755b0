"""What drafts save, and what they cost: the same run with and without, tier by tier, over a few epochs of few prompts.

    python tools/bench_speculation.py configs/quickstart.yaml --prompts 128
    python tools/bench_speculation.py SPEC --tiers exact,lenient rollout.speculation.draft_tokens=256 --json

Every tier runs the whole spec, engines and trainer, one after the other in one go; ratios are to the run without.
Tokens are those of all epochs, seconds those of generating a batch. Drafts of the epoch before exist from the second
epoch on. Fewer decoded tokens alone prove nothing: each draft is prefilled, and costs one or two requests more.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slimerl.resilience.tied import tied_command
from slimerl.rollout.tokenizer import PromptTokenizer
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE

TAIL_LINES = 80
OFF = "off"


@dataclass(frozen=True)
class Measured:
    tier: str
    drafted: float
    prefilled: float
    """Of all inputs, those that engines had no KV of."""
    accepted: float
    decoded: float
    epoch_s: list[float]
    """Seconds of generating, by epoch."""
    bias: float | None
    accuracy: float
    """Held out, after the last step; nan without `data.eval_path`."""
    prompts: int
    """That it was measured on."""

    @property
    def later_s(self) -> float:
        """Of one epoch with the answers of another."""
        return fmean(self.epoch_s[1:] or self.epoch_s)

    @property
    def error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.prompts) if self.prompts else math.nan


def main(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec; its output_dir is left alone.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of an epoch; a multiple of those of a step.")] = 128,
    epochs: Annotated[int, typer.Option(min=2)] = 3,
    tiers: Annotated[str, typer.Option(help="Separated by commas.")] = "exact,coupled,lenient",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run SPEC without drafts and with those of each tier."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 120)
    measured = []
    for tier in [OFF, *tiers.split(",")]:
        with console.status(tier), tempfile.TemporaryDirectory() as scratch:
            measured.append(measure(spec, overrides or [], tier, prompts, epochs, Path(scratch)))
        seconds = ", ".join(f"{each:.2f}" for each in measured[-1].epoch_s)
        console.print(f"{tier}: {measured[-1].decoded:,.0f} tokens decoded; seconds by epoch: {seconds}")
    if as_json:
        print(json.dumps([{**vars(each), "later_s": each.later_s, "error": each.error} for each in measured], indent=2))
        return
    console.print(table(measured, f"{spec.stem}: {epochs} epochs of {prompts} prompts"))


def measure(spec_file: Path, overrides: Sequence[str], tier: str, prompts: int, epochs: int, scratch: Path) -> Measured:
    """One run. Exits with the end of its output where it fails."""
    try:
        given = load_spec(spec_file, list(overrides))
        rows = given.data.train_path.read_text(encoding="utf-8").splitlines(keepends=True)[:prompts]
        steps = len(rows) * epochs // given.training.prompts_per_step
        data = scratch / "train.jsonl"
        data.write_text("".join(rows), encoding="utf-8")
        own: dict[str, Any] = {
            "output_dir": scratch / "run",
            "training.export_path": scratch / "model",
            "training.steps": steps,
            "training.optimizer.warmup_steps": min(given.training.optimizer.warmup_steps, steps),
            "data.train_path": data,
            "evaluation.every_steps": 0,
            "checkpoint.every_steps": 0,
            "rollout.speculation.tier": tier,
        }
        made = load_spec(spec_file, [*overrides, *(f"{key}={value}" for key, value in own.items())])
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    if len(rows) % made.training.prompts_per_step:
        raise typer.BadParameter(
            f"{len(rows)} prompts are no multiple of training.prompts_per_step = {made.training.prompts_per_step}"
        )
    effective = scratch / "spec.yaml"
    effective.write_text(dump_spec(made), encoding="utf-8")
    command = tied_command([sys.executable, "-m", "slimerl.cli", "run", str(effective)])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-TAIL_LINES:]), file=sys.stderr)
        raise typer.Exit(1)
    return read(made, tier, len(rows) // made.training.prompts_per_step)


def read(spec: RunSpec, tier: str, steps_per_epoch: int) -> Measured:
    records = read_records(spec.run_dir / METRICS_FILE)
    steps = [record for record in records if "rollout/seconds" in record]
    seconds = [record["rollout/seconds"] for record in steps]
    evaluated = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]

    def total(name: str) -> float:
        return sum(record.get(f"speculation/{name}_tokens", 0.0) for record in steps)

    generated = sum(record["rollout/generated_tokens"] for record in steps)
    held_out = spec.data.eval_path.read_text(encoding="utf-8").splitlines() if spec.data.eval_path else []
    return Measured(
        tier=tier,
        drafted=total("drafted"),
        prefilled=total("prefilled") if tier != OFF else _prefilled(spec, steps),
        accepted=total("accepted"),
        decoded=total("decoded") if tier != OFF else generated,
        epoch_s=[sum(seconds[at : at + steps_per_epoch]) for at in range(0, len(seconds), steps_per_epoch)],
        bias=fmean(each["speculation/bias_estimate"] for each in steps) if tier == "lenient" else None,
        accuracy=evaluated[-1] if evaluated else math.nan,
        prompts=min(len(held_out), spec.evaluation.max_prompts),
    )


def _prefilled(spec: RunSpec, steps: Sequence[dict[str, float]]) -> float:
    """Without drafts, of the prompts: each step has other ones, but their mean is that of all."""
    texts = [json.loads(line)["prompt"] for line in spec.data.train_path.read_text(encoding="utf-8").splitlines()]
    mean = fmean(len(ids) for ids in PromptTokenizer(spec.model.path, spec.data).encode(texts))
    return sum(step["rollout/samples"] * mean * (1 - step["rollout/cached_prompt_fraction"]) for step in steps)


def table(measured: Sequence[Measured], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("tier", no_wrap=True)
    for column in ("drafted", "accepted", "prefilled", "decoded", "s, later epochs", "ratio", "bias", "accuracy"):
        shown.add_column(column, justify="right")
    first = measured[0]
    for each in measured:
        shown.add_row(
            each.tier,
            *(f"{number:,.0f}" for number in (each.drafted, each.accepted, each.prefilled, each.decoded)),
            f"{each.later_s:.2f}",
            f"{first.later_s / each.later_s:.2f} ×",
            "" if each.bias is None else f"{each.bias:.3f}",
            "" if math.isnan(each.accuracy) else f"{each.accuracy:.1%} ± {each.error:.1%}",
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
