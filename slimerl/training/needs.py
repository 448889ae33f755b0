"""What the trainer can give an algorithm, and what it cannot yet. Pure.

Flows in: the spec of an algorithm. Flows out: one line for each thing that it needs and would not get.
"""

from dataclasses import fields

from slimerl.algorithms import algorithm_of
from slimerl.spec.schema import AlgorithmSpec
from slimerl.training.architecture import ModelArguments

SUPPLIED = frozenset(
    {"sequences", "entropy_gradient", "lengths", "reference", "proximal", "token_advantages", "whitening"}
    | {"critic", "pairs", "scores"}
)
"""Fields of `Needs` that the training loop fills."""


def unsupplied(spec: AlgorithmSpec) -> list[str]:
    """Empty where the algorithm can be trained. Raises CustomFunctionError."""
    needs = algorithm_of(spec).needs
    supplied = SUPPLIED if spec.teacher_path is None else SUPPLIED | {"teacher"}
    lacking = [each.name for each in fields(needs) if getattr(needs, each.name) and each.name not in supplied]
    if not lacking:
        return []
    if lacking == ["teacher"]:
        return [f"algorithm.name = {spec.name} needs a teacher; set algorithm.teacher_path to a checkpoint of one"]
    what = ", ".join(name.replace("_", " ") for name in lacking)
    return [f"algorithm.name = {spec.name} with these options needs {what}, which the trainer does not supply"]


def unroutable(spec: AlgorithmSpec, model: ModelArguments) -> list[str]:
    """One line where a routing is to be replayed in a model that has none."""
    if spec.routing_replay == "none" or model.sparse_layers:
        return []
    return [
        f"algorithm.routing_replay = {spec.routing_replay} replays which experts tokens went to, and the model of "
        "model.path has no experts; drop the key"
    ]
