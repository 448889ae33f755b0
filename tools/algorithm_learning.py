"""Each algorithm on one task: held-out accuracy before and after, steps, seconds, as a Markdown table.

    python tools/algorithm_learning.py configs/quickstart.yaml
    python tools/algorithm_learning.py configs/quickstart.yaml --only grpo --only rloo
    python tools/algorithm_learning.py SPEC --list

One run for each line of `CASES`, in OUT/NAME, all with the task's own learning rate and steps; what has been run is not
run again. The table goes to OUT/table.md. Exit code 1: a run failed, or did not learn.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from algorithm_table import table
from rich.console import Console
from variants import Variant, run_variants

from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE
from slimerl.training.needs import unsupplied

TABLE_FILE = "table.md"
LEARNT = 0.02
"""Least gain in held-out accuracy; two standard errors of 400 sums are about 0.05 at 50 %, and the task gains 0.4."""


@dataclass(frozen=True)
class Case:
    """`options`: of the section `algorithm`; `staleness`: of the samples, where the case is about stale ones."""

    title: str
    options: tuple[str, ...]
    staleness: int = 0


def _of(name: str, *options: str) -> tuple[str, ...]:
    return (f"name={name}", *options)


_STALE = 1
CASES: dict[str, Case] = {
    "grpo": Case("GRPO", _of("grpo")),
    "dr_grpo": Case("Dr.GRPO", _of("dr_grpo", "loss_length_tokens={max_new_tokens}")),
    "dapo": Case("DAPO", _of("dapo")),
    "gspo": Case("GSPO", _of("gspo")),
    "cispo": Case("CISPO", _of("cispo")),
    "rloo": Case("RLOO", _of("rloo")),
    "reinforce_pp": Case("REINFORCE++", _of("reinforce_pp")),
    "reinforce_pp_baseline": Case("REINFORCE++-baseline", _of("reinforce_pp_baseline")),
    "ppo": Case("PPO with critic", _of("ppo")),
    "decoupled_ppo": Case("decoupled PPO", _of("decoupled_ppo"), _STALE),
    "distillation": Case(
        "on-policy distillation from GRPO's model", _of("distillation", "teacher_path={out}/grpo/model")
    ),
    "token_tis": Case("GRPO, token TIS", _of("grpo", "correction=token_tis"), _STALE),
    "sequence_tis": Case("GRPO, sequence TIS", _of("grpo", "correction=sequence_tis"), _STALE),
    "mis": Case("GRPO, MIS", _of("grpo", "correction=mis"), _STALE),
    "icepop": Case("GRPO, IcePop", _of("grpo", "correction=icepop"), _STALE),
    # its usual tolerance is for samples of the same weights: a version between them rejects nearly all
    "geometric_rejection": Case("GRPO, geometric rejection", _of("grpo", "correction=geometric_rejection")),
    "behavior_proximal": Case("GRPO, ratio to the engine's policy", _of("grpo", "proximal=behavior"), _STALE),
    "kl_k2": Case("GRPO, KL k2 in the loss", _of("grpo", "kl_coef=0.01", "kl_estimator=k2")),
    "kl_k3": Case("GRPO, KL k3 in the loss", _of("grpo", "kl_coef=0.01", "kl_estimator=k3")),
    "kl_k3_plus": Case("GRPO, KL k3+ in the loss", _of("grpo", "kl_coef=0.01", "kl_estimator=k3+")),
    "kl_reward": Case("REINFORCE++, KL k1 in the reward", _of("reinforce_pp", "kl_coef=0.01", "kl_in=reward")),
    "entropy": Case("GRPO, entropy bonus", _of("grpo", "entropy_coef=0.001")),
    "sequence_mean": Case("GRPO, mean over samples", _of("grpo", "aggregation=sequence_mean")),
    "four_updates": Case("GRPO, 4 updates a step", _of("grpo")),
}
"""By the name of the run."""
FROM_DATA = ("sft", "dpo", "reward_model")
"""They read responses from rows of their own, and have tasks of their own."""
FURTHER: Mapping[str, tuple[str, ...]] = {"four_updates": ("training.minibatches_per_step=4",)}
"""Keys of other sections."""


def main(
    spec: Path,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Names of cases; default: all.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Print the cases and what keeps some from being run.")] = False,
    out: Annotated[Path, typer.Option(help="Of the runs and the table.")] = Path("runs/algorithms"),
) -> None:
    """Run SPEC with each algorithm and write the table."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    if unknown := [name for name in only or () if name not in CASES]:
        raise typer.BadParameter(f"unknown cases: {', '.join(unknown)}; there are {', '.join(CASES)}")
    own = ["evaluation.every_steps=0", "checkpoint.every_steps=0", *(overrides or ())]
    variants, left_out = [], {}
    for name in only or CASES:
        variant = Variant(name, tuple(options_of(name, load_spec(spec, own), out)))
        if why := refused(spec, [*own, *variant.overrides]):
            left_out[name] = why
        else:
            variants.append(variant)
    for name, why in left_out.items():
        console.print(f"{name} is left out: {why}", style="yellow", markup=False, highlight=False)
    if names:
        console.print("\n".join(f"{variant.name}: {' '.join(variant.overrides)}" for variant in variants), markup=False)
        return
    results, problems = run_variants(spec, own, variants, out, figures, console)
    problems += [f"{name} did not learn" for name, each in results.items() if each["after"] < each["before"] + LEARNT]
    text = "\n".join(lines(results)) + "\n"
    (out / TABLE_FILE).write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    raise typer.Exit(1 if problems else 0)


def options_of(name: str, spec: RunSpec, out: Path) -> Iterator[str]:
    """The overrides of a case."""
    case = CASES[name]
    # the whole section at once: an option of the spec's own algorithm may be none of this one's
    values = {"max_new_tokens": spec.rollout.max_new_tokens, "out": out}
    pairs = (option.format(**values).split("=") for option in case.options)
    yield "algorithm={" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
    yield f"rollout.max_staleness={case.staleness}"
    yield from FURTHER.get(name, ())


def refused(spec: Path, overrides: Sequence[str]) -> str:
    """Why the case cannot be run; empty: it can."""
    try:
        return "; ".join(unsupplied(load_spec(spec, overrides).algorithm))
    except SpecError as error:
        return str(error)


def figures(variant: Variant, run_dir: Path) -> dict[str, Any]:
    """Of one run. Seconds: from the first weights to the last step, evaluations included."""
    records = read_records(run_dir / METRICS_FILE)
    evaluated = [record for record in records if "eval/accuracy" in record]
    return {
        "title": CASES[variant.name].title,
        "options": list(variant.overrides),
        "before": evaluated[0]["eval/accuracy"],
        "after": evaluated[-1]["eval/accuracy"],
        "steps": records[-1]["step"],
        "seconds": records[-1]["time"] - records[0]["time"],
    }


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The table, Markdown."""
    rows = [
        [
            each["title"],
            f"`{'` `'.join(each['options'])}`",
            f"{each['before']:.1%}",
            f"{each['after']:.1%}",
            str(each["steps"]),
            f"{each['seconds']:.0f}",
        ]
        for each in results.values()
    ]
    return table(["", "keys", "accuracy before", "after", "steps", "seconds"], rows)


if __name__ == "__main__":
    typer.run(main)
