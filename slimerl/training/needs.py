"""What the trainer can give an algorithm, and what it cannot yet. Pure.

Flows in: the spec of an algorithm. Flows out: one line for each thing that it needs and would not get.
"""

from dataclasses import fields

from slimerl.algorithms import algorithm_of
from slimerl.spec.schema import AlgorithmSpec

SUPPLIED = frozenset(
    {"sequences", "entropy_gradient", "lengths", "reference", "proximal", "token_advantages", "whitening"}
    | {"critic", "pairs", "scores"}
)
"""Fields of `Needs` that the training loop fills."""


def unsupplied(spec: AlgorithmSpec) -> list[str]:
    """Empty where the algorithm can be trained. Raises CustomFunctionError."""
    needs = algorithm_of(spec).needs
    lacking = [each.name for each in fields(needs) if getattr(needs, each.name) and each.name not in SUPPLIED]
    if not lacking:
        return []
    what = ", ".join(name.replace("_", " ") for name in lacking)
    return [f"algorithm.name = {spec.name} with these options needs {what}, which the trainer does not supply"]
