"""Where the time of a step goes: seconds of each phase, tokens per second, padding, prompts, memory.

    python tools/bench_step.py configs/quickstart.yaml                                # the whole run, real engines
    python tools/bench_step.py SPEC --trainer-only --prompt-tokens 60 --response-tokens 24
    python tools/bench_step.py SPEC --trainer-only --compare model.dtype=fp32 --compare model.dtype=bf16
    python tools/bench_step.py SPEC training.parallel.data=2 --json

The first step warms up and is left out. Variants (`--compare`, overrides separated by spaces) take turns for `--rounds`
rounds, so that a slower hour of the machine meets all of them; their ratios are what to look at.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slimerl.conductor.roles import role_commands
from slimerl.resilience.tied import tied_command
from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE
from slimerl.telemetry.step_times import INSIDE, mean_and_spread, phases

WORKER = Path(__file__).with_name("bench_step_trainer.py")
TAIL_LINES = 80

SHOWN_S = 0.0005
"""Phases that take less are left out of the table."""

AFTER_THE_STEPS = ("export", "evaluate")

Seconds = dict[tuple[str, str], list[float]]
"""(role, path of the phase) → one value for each step."""


@dataclass
class Measured:
    """What the measured steps of one variant say; more rounds add up."""

    overrides: str
    phases: Seconds = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each step."""

    def add(self, run_dir: Path) -> None:
        records = [record for record in read_records(run_dir / METRICS_FILE) if "time/step" in record][1:]
        numbers = [record["step"] for record in records]
        before = len(self.steps)
        for phase in phases(run_dir):
            values = phase.of(numbers)
            if any(values) and phase.path not in AFTER_THE_STEPS:
                # a phase that is new in this round took no time in those before
                self.phases.setdefault((phase.role, phase.path), [0.0] * before).extend(values)
        self.steps += records

    def of(self, metric: str) -> list[float]:
        return [record[metric] for record in self.steps if metric in record]

    def figures(self) -> dict[str, float]:
        """Means over the steps; names as they are shown."""
        computed, step_s = fmean(self.of("train/computed_tokens")), fmean(self.of("time/step"))
        figures = {
            "seconds per step": step_s,
            "tokens/s computed": computed / step_s,
            "tokens/s computed, while training": computed / fmean(self.of("time/train")),
            "tokens/s useful (sampled)": fmean(self.of("train/sampled_tokens")) / step_s,
            "padding, share of computed": fmean(self.of("train/padding_share")),
        }
        if self.of("rollout/samples"):
            # a response's last token predicts nothing, and is not computed
            responses = fmean(self.of("rollout/samples")) * (fmean(self.of("rollout/mean_response_tokens")) - 1)
            own = computed * (1 - figures["padding, share of computed"])
            figures["prompts, share of computed"] = max(0.0, own - responses) / computed
            figures["mean response tokens"] = fmean(self.of("rollout/mean_response_tokens"))
        memory = {name for record in self.steps for name in record if name.startswith("memory/")}
        return figures | {f"{name.removeprefix('memory/')}": max(self.of(name)) for name in sorted(memory)}

    def as_json(self) -> dict[str, Any]:
        seconds = {
            f"{role}: {path}": dict(zip(("mean_s", "spread_s"), mean_and_spread(values), strict=True))
            for (role, path), values in self.phases.items()
        }
        return {"overrides": self.overrides, "steps": len(self.steps), "phases": seconds, "figures": self.figures()}


@dataclass(frozen=True)
class Load:
    """The made-up samples of `--trainer-only`: mean lengths; each length is drawn between half and one and a half."""

    prompt_tokens: int
    response_tokens: int


def main(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec; its output_dir is left alone.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure, beyond the one that warms up.")] = 5,
    trainer_only: Annotated[bool, typer.Option("--trainer-only", help="No engines; made-up samples.")] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean length of the made-up prompts.")] = 64,
    response_tokens: Annotated[int, typer.Option(min=1, help="Mean length of the made-up responses.")] = 32,
    compare: Annotated[
        list[str] | None, typer.Option(help="A variant: overrides separated by spaces. Give it once for each.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run SPEC for a few steps and print where the time goes."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 100)
    load = Load(prompt_tokens, response_tokens) if trainer_only else None
    variants = [Measured(each) for each in compare or [""]]
    for number in range(rounds):
        for variant in variants:
            what = variant.overrides or spec.name
            with console.status(f"round {number + 1} of {rounds}: {what}"), tempfile.TemporaryDirectory() as scratch:
                measured = measure(spec, [*(overrides or ()), *variant.overrides.split()], steps, load, Path(scratch))
                variant.add(measured)
    if as_json:
        print(json.dumps([variant.as_json() for variant in variants], indent=2))
        return
    for variant in variants:
        console.print(phase_table(variant, spec.name))
    console.print(figure_table(variants, spec.name))


def measure(spec_file: Path, overrides: Sequence[str], steps: int, load: Load | None, scratch: Path) -> Path:
    """One run of `steps` + 1 steps; returns its directory. Exits with the end of the output where it fails."""
    run_dir = scratch / "run"
    own = {
        "output_dir": run_dir,
        "training.export_path": scratch / "model",
        "training.steps": steps + 1,
        "training.optimizer.warmup_steps": 0,  # may not exceed the steps
        "data.eval_path": "null",
        "evaluation.every_steps": "0",
    }
    try:
        spec = load_spec(spec_file, [*overrides, *(f"{key}={value}" for key, value in own.items())])
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    if load is not None and not spec.uses_engines:
        raise typer.BadParameter("--trainer-only makes up the samples of engines; this algorithm uses none anyway")
    effective = scratch / "spec.yaml"
    effective.write_text(dump_spec(spec), encoding="utf-8")
    command, environment = _command(spec, effective, load)
    done = subprocess.run(
        tied_command(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-TAIL_LINES:]), file=sys.stderr)
        raise typer.Exit(1)
    return run_dir


def _command(spec: RunSpec, spec_file: Path, load: Load | None) -> tuple[list[str], dict[str, str] | None]:
    if load is None:
        return [sys.executable, "-m", "slimerl.cli", "run", str(spec_file)], None
    trainer = role_commands(spec, spec_file)[-1]
    launcher = trainer.command[: trainer.command.index("slimerl.training") - 1]
    worker = [str(WORKER), str(spec_file), str(load.prompt_tokens), str(load.response_tokens)]
    return [*launcher, *worker], trainer.environment


def phase_table(measured: Measured, name: str) -> Table:
    """Mean and spread of each phase, those inside another below it."""
    table = Table(title=f"{name} {measured.overrides}: {len(measured.steps)} steps", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("mean s", "± s", "of step"):
        table.add_column(column, justify="right")
    step_s, spread = mean_and_spread(measured.of("time/step"))
    table.add_row("step", f"{step_s:.3f}", f"{spread:.3f}", "100 %", style="bold")
    for role in ("trainer", "rollout", "engine"):
        rows = [
            (path, values)
            for (of_role, path), values in measured.phases.items()
            if of_role == role and fmean(values) >= SHOWN_S
        ]
        for number, (path, values) in enumerate(rows):
            mean, spread = mean_and_spread(values)
            *around, last = path.split(INSIDE)
            label = f"{role if number == 0 else '':<8} {'  ' * len(around)}{last}"
            table.add_row(label, f"{mean:.3f}", f"{spread:.3f}", f"{mean / step_s:.0%}")
    return table


def figure_table(variants: Sequence[Measured], name: str) -> Table:
    """Figures of all variants side by side, and the ratio of each one's step to the first one's."""
    table = Table(title=f"{name}: figures", title_justify="left")
    table.add_column("", no_wrap=True)
    for variant in variants:
        table.add_column(variant.overrides or "as it stands", justify="right")
    figures = [variant.figures() for variant in variants]
    for label in dict.fromkeys(label for each in figures for label in each):
        table.add_row(label, *(_shown(label, each.get(label)) for each in figures))
    if len(variants) > 1:
        first = figures[0]["seconds per step"]
        ratios = [first / each["seconds per step"] for each in figures]
        table.add_row("faster than the first", *(f"{ratio:.2f} ×" for ratio in ratios), style="bold")
    return table


def _shown(label: str, value: float | None) -> str:
    if value is None:
        return ""
    if "share" in label:
        return f"{value:.1%}"
    return f"{value:.3f}" if label.endswith(("step", "gib")) else f"{value:,.0f}"


if __name__ == "__main__":
    typer.run(main)
