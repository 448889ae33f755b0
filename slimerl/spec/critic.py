"""The critic of PPO: a model of its own in the trainer's ranks, with the trainer's layout.

Flows in: the section `training.critic`. Flows out: a `CriticSpec`. Invariant: it is read by the algorithm that has a
critic, and refused elsewhere.
"""

from pathlib import Path

from slimerl.spec.algorithm import AlgorithmSpec
from slimerl.spec.fields import FilePath, Strict
from slimerl.spec.optimizer import OptimizerSpec


class CriticSpec(Strict):
    path: FilePath | None = None
    """Hugging Face checkpoint that it starts from: a language model, whose value is 0 everywhere at first, or a reward
    model; with the policy's tokenizer. Default: model.path."""
    optimizer: OptimizerSpec | None = None
    """Default: as training.optimizer."""


def check_critic(critic: CriticSpec | None, algorithm: AlgorithmSpec, steps: int, megatron_path: Path | None) -> None:
    """Raises ValueError: a critic that nothing trains, or a scalar head that a checkpoint does not have."""
    if critic is not None and not algorithm.has_critic:
        raise ValueError(f"training.critic is not read by {algorithm.name}, which has no critic; drop it")
    if algorithm.value_warmup_steps >= steps:
        raise ValueError(
            f"algorithm.value_warmup_steps = {algorithm.value_warmup_steps} leaves no step of training.steps = {steps} "
            "to the policy; lower the one or raise the other"
        )
    if algorithm.name == "reward_model" and megatron_path is not None:
        raise ValueError(
            "model.megatron_path: a reward model takes its weights from a Hugging Face checkpoint; leave the key out"
        )
