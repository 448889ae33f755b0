"""Supervised fine-tuning: the negative log-likelihood of given responses, as an algorithm of the same trainer."""

from collections.abc import Sequence

from slimerl.algorithms.terms import LossTerms, TokenBatch
from slimerl.spec.schema import AlgorithmSpec


class Sft:
    def __init__(self, spec: AlgorithmSpec) -> None: ...

    def advantages(self, rewards: Sequence[float], groups: Sequence[str]) -> tuple[list[float], dict[str, float]]:
        """There is nothing to be estimated: every given response counts the same."""
        return [1.0] * len(rewards), {}

    def loss(self, tokens: TokenBatch) -> LossTerms:
        return LossTerms(-tokens.policy_logprobs)
