"""GRPO steps side by side with TRL: the same model, prompts, reward and cores, taking turns in one run.

    python tools/fetch_smollm2.py          # once
    python tools/bench_trl.py              # fp32 and bf16, about 20 minutes on 2 cores
    python tools/bench_trl.py --dtype bf16 --steps 3 --rounds 2 training.micro_batch_tokens=2048

8 prompts × 8 samples of at most 32 tokens with SmolLM2-135M-Instruct. TRL gets an environment of its own (about 2 GB,
made once in the cache directory), Hugging Face's generation, no gradient checkpointing, and weights in the dtype that
is measured. Each side's first step warms up and is left out. A policy that answers longer costs more: compare the mean
lengths, or the seconds per 1,000 completion tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from quickstart_data import write_jsonl
from rich.console import Console
from rich.table import Table

from slimerl.resilience.tied import tied_command
from slimerl.spec import load_spec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE
from slimerl.telemetry.step_times import mean_and_spread

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "configs" / "smollm2_135m_arithmetic.yaml"
WORKER = Path(__file__).with_name("bench_trl_worker.py")

REQUIREMENTS = (
    "trl==1.16.*",
    "torch==2.13.0",
    "transformers",
    "accelerate",
    "datasets",
    # what the reward needs
    "math-verify==0.9.0",
    "msgspec==0.23.0",
)
PROMPTS, SAMPLES, MAX_NEW_TOKENS = 8, 8, 32
LEARNING_RATE = 1e-6
"""So small that both sides go on answering as they do."""

TAIL_LINES = 40


@dataclass
class Side:
    """Steps of one system in one dtype: seconds, and mean completion tokens."""

    seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def add(self, steps: Iterable[tuple[float, float]]) -> None:
        for seconds, length in steps:
            self.seconds.append(seconds)
            self.lengths.append(length)

    @property
    def seconds_per_thousand(self) -> float:
        """Of completion tokens."""
        return 1000 * sum(self.seconds) / (PROMPTS * SAMPLES * sum(self.lengths))


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of slimerl's spec.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16; once for each.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each side in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often the sides take turns.")] = 2,
    cores: Annotated[int, typer.Option(min=1, help="Cores for everything.")] = 2,
    trl_batch: Annotated[int, typer.Option(min=1, help="Samples that TRL trains at once; must divide 64.")] = 16,
    only: Annotated[str | None, typer.Option(help="slimerl or trl: to try one side.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure and print the ratio."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 100)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # every process started from here inherits it
    measured = {each: {"slimerl": Side(), "trl": Side()} for each in dtype or ["fp32", "bf16"]}
    sides = [only] if only else ["slimerl", "trl"]
    if "trl" in sides:
        with console.status("making TRL's environment"):
            python = trl_python()
    with tempfile.TemporaryDirectory() as scratch:
        prompts = same_prompts(Path(scratch))
        turns = [(number, name, side) for number in range(rounds) for name in measured for side in sides]
        for number, name, side in turns:
            directory = Path(scratch) / f"{side}-{name}-{number}"
            with console.status(f"round {number + 1} of {rounds}: {side} {name}"):
                if side == "trl":
                    found = trl_steps(python, prompts, directory, name, steps, trl_batch, cores)
                else:
                    found = slimerl_steps(prompts, directory, [f"model.dtype={name}", *(overrides or ())], steps)
            measured[name][side].add(found)
    if as_json:
        print(json.dumps({name: {side: vars(each) for side, each in pair.items()} for name, pair in measured.items()}))
        return
    console.print(table(measured, sides))


def same_prompts(scratch: Path) -> Path:
    """So many prompts as a step takes: then every step of both sides has these."""
    source = load_spec(SPEC).data.train_path
    if not (ROOT / source).exists():
        raise typer.BadParameter(f"{source} is missing; run tools/fetch_smollm2.py first")
    rows = [json.loads(line) for line in (ROOT / source).read_text(encoding="utf-8").splitlines()]
    path = scratch / "prompts.jsonl"
    write_jsonl(path, rows[:PROMPTS])
    return path


def slimerl_steps(prompts: Path, directory: Path, overrides: Sequence[str], steps: int) -> list[tuple[float, float]]:
    """Seconds and mean completion tokens of each measured step."""
    own = {
        "output_dir": directory,
        "data.train_path": prompts,
        "data.eval_path": "null",
        "evaluation.every_steps": "0",
        "training.steps": steps + 1,
        "training.prompts_per_step": PROMPTS,
        "training.optimizer.lr": LEARNING_RATE,
        "training.optimizer.warmup_steps": 0,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": MAX_NEW_TOKENS,
    }
    spec = load_spec(SPEC, [*(f"{key}={value}" for key, value in own.items()), *overrides])
    spec_file = directory.with_suffix(".yaml")
    spec_file.write_text(dump_spec(spec), encoding="utf-8")
    _run([sys.executable, "-m", "slimerl.cli", "run", str(spec_file)], {})
    records = [record for record in read_records(directory / METRICS_FILE) if record["step"] > 1]
    return [(record["time/step"], record["rollout/mean_response_tokens"]) for record in records]


def trl_steps(
    python: Path, prompts: Path, directory: Path, dtype: str, steps: int, batch: int, cores: int
) -> list[tuple[float, float]]:
    """Seconds and mean completion tokens of each measured step."""
    directory.mkdir()
    job = {
        "model": str(ROOT / load_spec(SPEC).model.path),
        "prompts": str(prompts),
        "output": str(directory),
        "dtype": dtype,
        "steps": steps + 1,
        "samples": SAMPLES,
        "samples_per_step": PROMPTS * SAMPLES,
        "batch": batch,
        "max_new_tokens": MAX_NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "threads": cores,
    }
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(cores)}
    _run([str(python), str(WORKER), json.dumps(job)], {**quiet, "PYTHONPATH": str(ROOT)})
    records = json.loads((directory / "steps.json").read_text(encoding="utf-8"))
    return [(record["seconds"], record["mean_length"]) for record in records[1:]]


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slimerl" / "trl"
    python, stamp = cache / "bin" / "python", cache / "installed"
    wanted = "\n".join(REQUIREMENTS)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(cache, with_pip=True, clear=True)
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS], {})
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        tied_command(list(command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-TAIL_LINES:]), file=sys.stderr)
        raise typer.Exit(1)


def table(measured: dict[str, dict[str, Side]], sides: Sequence[str]) -> Table:
    """One row for each dtype and side, and the ratio."""
    shown = Table(title=f"GRPO, {PROMPTS} prompts × {SAMPLES} samples, SmolLM2-135M", title_justify="left")
    shown.add_column("", no_wrap=True)
    for column in ("s per step", "± s", "steps", "mean tokens", "s per 1,000 tokens"):
        shown.add_column(column, justify="right")
    for dtype, pair in measured.items():
        for side in sides:
            each = pair[side]
            mean, spread = mean_and_spread(each.seconds)
            figures = f"{mean:.2f}", f"{spread:.2f}", str(len(each.seconds)), f"{fmean(each.lengths):.1f}"
            shown.add_row(f"{side} {dtype}", *figures, f"{each.seconds_per_thousand:.2f}")
        if len(sides) == 2:
            ours, theirs = pair["slimerl"], pair["trl"]
            by_step = fmean(theirs.seconds) / fmean(ours.seconds)
            by_token = theirs.seconds_per_thousand / ours.seconds_per_thousand
            cells = f"{by_step:.2f} ×", "", "", "", f"{by_token:.2f} ×"
            shown.add_row(f"faster than TRL, {dtype}", *cells, style="bold", end_section=True)
    return shown


if __name__ == "__main__":
    typer.run(main)
