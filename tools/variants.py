"""Runs of one spec that differ in some keys, one after another, with their record kept: what was run is not run again.

Flows in: a spec, overrides, and `Variant`s. Flows out: a run directory OUT/NAME for each, and OUT/results.json, written
anew after each of them: {NAME: figures}.
Invariant: a record is used again only where the run came to its end and its effective spec is the one asked for; a run
that was cut short begins anew, since its seconds would not be those of one run.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from slimerl.conductor.run_directory import SPEC_FILE
from slimerl.resilience.tied import tied_command
from slimerl.spec import load_spec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import EVENTS_FILE, exported

RESULTS_FILE = "results.json"
TAIL_LINES = 30


@dataclass(frozen=True)
class Variant:
    """`overrides`: beside those of all variants."""

    name: str
    overrides: tuple[str, ...] = ()


class VariantFailed(RuntimeError):
    """Its run did not come to its end; the message ends with what it printed."""


def run_variants(
    spec: Path,
    overrides: Sequence[str],
    variants: Sequence[Variant],
    out: Path,
    figures: Callable[[Variant, Path], Mapping[str, Any]],
    console: Console,
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Run what has not been run yet.

    Args:
        figures: of a run that came to its end, from its directory; values that JSON can hold.

    Returns:
        The figures by the variants' names, and what went wrong, one line for each variant that has none.
    """
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Mapping[str, Any]] = {}
    problems: list[str] = []
    for number, variant in enumerate(variants, start=1):
        run_dir = out / variant.name
        try:
            with console.status(f"{number} of {len(variants)}: {variant.name}"):
                has_run = run_once(spec, [*overrides, *variant.overrides], run_dir)
        except VariantFailed as failure:
            console.print(str(failure), style="red", markup=False, highlight=False)
            problems.append(f"{variant.name} did not come to its end; see {run_dir / 'logs'}")
            continue
        results[variant.name] = figures(variant, run_dir)
        console.print(f"{variant.name}: {'run' if has_run else 'has been run'}", markup=False, highlight=False)
        write_results(out, results)
    return results, problems


def run_once(spec: Path, overrides: Sequence[str], run_dir: Path) -> bool:
    """Run to the end in `run_dir`, unless that has been done; returns whether it had to be. Raises VariantFailed."""
    own = [f"output_dir={run_dir}", f"training.export_path={run_dir / 'model'}", *overrides]
    if is_done(run_dir, dump_spec(load_spec(spec, own))):
        return False
    command = [sys.executable, "-m", "slimerl.cli", "run", str(spec), *own, "--fresh"]
    done = subprocess.run(tied_command(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise VariantFailed(f"{run_dir.name}: the run ended with exit code {done.returncode}:\n{tail}")
    return True


def is_done(run_dir: Path, effective_spec: str) -> bool:
    """Has a run of just that spec come to its end there?"""
    recorded = run_dir / SPEC_FILE
    if not recorded.exists() or recorded.read_text(encoding="utf-8") != effective_spec:
        return False
    return exported(read_records(run_dir / EVENTS_FILE))


def write_results(out: Path, results: Mapping[str, Any]) -> None:
    """The whole file at once: a reader sees the one or the other."""
    part = out / f"{RESULTS_FILE}.part"
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(out / RESULTS_FILE)
