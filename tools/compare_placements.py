"""Colocated and disaggregated placement train the same: tokens and weights after some synchronous steps.

    python tools/compare_placements.py configs/quickstart.yaml --steps 5

SPEC is run twice, with `cluster.placement` colocated, in turns and over shared memory, and disaggregated, over a
process group; sampling is keyed and the weights are fp32, so nothing may differ: token counts, rewards, losses and
gradient norms of each step, and every bit of the trained weights. What has been run is not run again. Without CUDA
turns are taken all the same (`cluster.turns: always`). Exit code 1: something differs.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from safetensors.torch import load_file
from variants import Variant, run_variants

from slimerl.spec import SpecError, load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE

PLACEMENTS = (
    Variant("colocated", ("cluster.placement=colocated", "cluster.turns=always", "sync.transport=ipc")),
    Variant("disaggregated", ("cluster.placement=disaggregated", "sync.transport=broadcast")),
)
COMPARED = ("rollout/generated_tokens", "rollout/mean_reward", "train/loss", "train/grad_norm")
COMPARISON_FILE = "comparison.json"


def main(
    spec: Path,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    out: Annotated[Path, typer.Option(help="Of the runs and the comparison.")] = Path("runs/placements"),
) -> None:
    """Run SPEC in both placements and compare."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    # samples of the present weights alone: what else is in flight depends on the clock
    own = [f"training.steps={steps}", "rollout.max_staleness=0", *(overrides or ())]
    try:
        if load_spec(spec, own).model.dtype != "fp32":
            raise typer.BadParameter("engine and trainer agree to the bit in fp32 alone; add model.dtype=fp32")
        results, problems = run_variants(spec, own, PLACEMENTS, out, lambda _, run_dir: figures(run_dir), console)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    if not problems:
        problems = [*unequal_steps(results), *unequal_weights(*(out / each.name for each in PLACEMENTS))]
    (out / COMPARISON_FILE).write_text(json.dumps({"runs": results, "problems": problems}, indent=1) + "\n")
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if not problems:
        console.print(f"{steps} steps: the same tokens, losses and weights in both placements", highlight=False)
    raise typer.Exit(1 if problems else 0)


def figures(run_dir: Path) -> dict[str, list[float]]:
    """Of each step of a run."""
    steps = [record for record in read_records(run_dir / METRICS_FILE) if record["step"]]
    return {name: [record[name] for record in steps] for name in COMPARED}


def unequal_steps(results: dict[str, Any]) -> list[str]:
    one, other = (results[each.name] for each in PLACEMENTS)
    return [f"{name} by step: {one[name]} and {other[name]}" for name in COMPARED if one[name] != other[name]]


def unequal_weights(one: Path, other: Path) -> list[str]:
    """What differs between the models that two runs have exported."""
    ours, theirs = (load_file(run_dir / "model" / "model.safetensors") for run_dir in (one, other))
    if ours.keys() != theirs.keys():
        return [f"tensors of one model alone: {', '.join(sorted(ours.keys() ^ theirs.keys()))}"]
    return [f"{name} differs" for name in ours if not ours[name].equal(theirs[name])]


if __name__ == "__main__":
    typer.run(main)
