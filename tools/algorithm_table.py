"""Print the documentation of all algorithms and their options as Markdown, from the tables of the package.

    python tools/algorithm_table.py

It stands in slimerl/algorithms/README.md, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slimerl.algorithms import ALGORITHMS, algorithm_of
from slimerl.algorithms.corrections import CORRECTIONS
from slimerl.algorithms.kl import KL_ESTIMATORS
from slimerl.algorithms.table import needs_in_words
from slimerl.spec.algorithm import ALGORITHM_OPTIONS, CORRECTION_OPTIONS, AlgorithmSpec, options_read

EXAMPLES: dict[str, dict[str, Any]] = {
    "dr_grpo": {"loss_length_tokens": 1024},
    "custom": {"advantage_function": "statistics:fmean"},
}
"""Options without which an algorithm cannot be made."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; bars inside cells are escaped."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def default_of(option: str, differing: Any) -> str:
    value = differing if differing is not None else AlgorithmSpec.model_fields[option].default
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def algorithms() -> Iterator[str]:
    rows = []
    for name, entry in ALGORITHMS.items():
        needs = "–"
        if name != "custom":
            needs = needs_in_words(algorithm_of(AlgorithmSpec(name=name, **EXAMPLES.get(name, {}))).needs)
        rows.append([f"`{name}`", entry.title, entry.advantage, entry.loss, needs, entry.source])
    yield from table(["`algorithm.name`", "", "advantage", "loss of a token", "needs", "source"], rows)


def options() -> Iterator[str]:
    rows = []
    for name in ALGORITHMS:
        read = {key: value for key, value in options_read({"name": name}).items() if key != "name"}
        shown = (f"{key} {default_of(key, differing)}" for key, differing in read.items())
        rows.append([f"`{name}`", ", ".join(shown) or "–"])
    yield from table(["`algorithm.name`", "options and their defaults"], rows)


def corrections() -> Iterator[str]:
    rows = []
    for name, entry in CORRECTIONS.items():
        shown = (f"{key} {default_of(key, differing)}" for key, differing in CORRECTION_OPTIONS[name].items())
        rows.append([f"`{name}`", entry.formula, ", ".join(shown), entry.source])
    yield from table(["`algorithm.correction`", "weight, w = π_prox/μ", "options and their defaults", "source"], rows)


def estimators() -> Iterator[str]:
    rows = [[f"`{name}`", each.formula, each.in_loss, each.in_reward] for name, each in KL_ESTIMATORS.items()]
    yield from table(["`algorithm.kl_estimator`", "estimate, r = π_ref/π_θ", "in the loss", "in the reward"], rows)


def document() -> str:
    """The whole generated section."""
    sections = {
        "Algorithms": (
            "ρ = π_θ/π_prox; μ is the policy that sampled; sg: without gradient. Losses are averaged as "
            "`algorithm.aggregation` says.",
            algorithms(),
        ),
        "Options": ("An option that the algorithm does not read is refused.", options()),
        "Train–inference corrections": (
            f"Read by {', '.join(f'`{n}`' for n, of in ALGORITHM_OPTIONS.items() if 'correction' in of)}. "
            "A masked token still counts in the divisor.",
            corrections(),
        ),
        "Divergence from the reference": ("On with `algorithm.kl_coef` above 0.", estimators()),
    }
    return "\n".join(f"## {title}\n\n{note}\n\n" + "\n".join(lines) + "\n" for title, (note, lines) in sections.items())


if __name__ == "__main__":
    print(document(), end="")
