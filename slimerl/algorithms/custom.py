"""An algorithm of the user's own: advantage, loss or both by import path; what is not given is GRPO's.

Flows in: `algorithm.advantage_function` and `algorithm.loss_function`. Flows out: a policy-gradient algorithm with the
same corrections, divergence, entropy bonus and aggregation as all others.
Invariant: a function is called only after its parameters were checked, and its result is checked each time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.terms import Scores, TokenBatch
from slimerl.spec.algorithm import AlgorithmSpec
from slimerl.spec.functions import CustomFunctionError, load_function

ADVANTAGE_PARAMETERS = ("rewards", "groups")
"""(rewards: Sequence[float], groups: Sequence[str]) → one advantage per sample."""
LOSS_PARAMETERS = ("tokens",)
"""(tokens: TokenBatch) → the loss of each token, [tokens] with gradient, before correction and aggregation."""


class Custom(Grpo):
    """Raises CustomFunctionError when it is made, before a run begins."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        super().__init__(spec)
        self._advantage = self._loaded("advantage_function", ADVANTAGE_PARAMETERS)
        self._surrogate = self._loaded("loss_function", LOSS_PARAMETERS)

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        if self._advantage is None:
            return super().outcomes(rewards, groups, lengths)
        found = [float(each) for each in self._advantage(rewards, groups)]
        if len(found) != len(rewards) or not all(map(math.isfinite, found)):
            raise CustomFunctionError(
                f"algorithm.advantage_function {self.spec.advantage_function} gave {len(found)} numbers for "
                f"{len(rewards)} samples, {sum(not math.isfinite(each) for each in found)} of them not finite"
            )
        return found, {}

    def surrogate(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._surrogate is None:
            return super().surrogate(tokens)
        found, policy = self._surrogate(tokens), tokens.policy_logprobs
        if not isinstance(found, torch.Tensor) or found.shape != policy.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise CustomFunctionError(
                f"algorithm.loss_function {self.spec.loss_function} must give one loss per token, shape "
                f"{tuple(policy.shape)}, but gave {shape}; aggregation is done for it"
            )
        if policy.requires_grad and not found.requires_grad:
            raise CustomFunctionError(
                f"algorithm.loss_function {self.spec.loss_function} gave a loss without gradient; it must be computed "
                "from tokens.policy_logprobs"
            )
        return found, torch.zeros_like(found.detach())

    def _loaded(self, key: str, parameters: Sequence[str]) -> Callable[..., Any] | None:
        path = getattr(self.spec, key)
        return load_function(path, parameters, f"algorithm.{key}") if path is not None else None
