"""The terms that all algorithms share: what a loss is given, and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class TokenBatch:
    """The sampled tokens of one micro-batch, one entry per token; all tensors [tokens], float32.

    Three policies, never to be confused:
        behavior: what the engine reported while sampling.
        proximal: the trainer's own log-probabilities with the weights at the start of the step.
        policy: the trainer's, inside the loss, with gradient.
    """

    policy_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class LossTerms:
    """`per_token` [tokens]: the loss of each token, with gradient, not yet divided by anything.

    `means`: further [tokens] tensors, to be reported as means over all tokens of the step; `maxima` as maxima.
    """

    per_token: torch.Tensor
    means: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One algorithm with its settings."""

    def advantages(self, rewards: Sequence[float], groups: Sequence[str]) -> tuple[list[float], dict[str, float]]:
        """One advantage per sample of a whole step, and figures to report. `groups`: the samples' group ids."""
        ...

    def loss(self, tokens: TokenBatch) -> LossTerms: ...
