"""What turns rewards into a gradient: pure torch, no Megatron, no I/O.

Flows in: rewards and groups of a step; log-probabilities of sampled tokens. Flows out: advantages, one per sample;
the loss of a micro-batch, as a *sum* over its tokens. Invariant: no function here divides by anything that depends
on how a step was split over micro-batches or ranks; the trainer divides once, by the global number of tokens.

To add an algorithm: write it in a file of its own and list it in `ALGORITHMS`.
"""

from collections.abc import Callable

from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.sft import Sft
from slimerl.algorithms.terms import Algorithm, LossTerms, TokenBatch
from slimerl.spec.schema import AlgorithmSpec

ALGORITHMS: dict[str, Callable[[AlgorithmSpec], Algorithm]] = {"grpo": Grpo, "sft": Sft}
"""`algorithm.name` of the spec → how it is made."""

__all__ = ["ALGORITHMS", "Algorithm", "LossTerms", "TokenBatch", "algorithm_of"]


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that the spec names (the spec admits no other names than `ALGORITHMS` has)."""
    return ALGORITHMS[spec.name](spec)
