"""Decoupled PPO for asynchronous training: the clip is around the proximal policy, the weight corrects for the policy
that sampled; advantages as GRPO's.

loss_t = (π_prox/μ)·max(-uA, -clip(u)A), u = π_θ/π_prox, π_prox recomputed when the batch arrives. Without this split
a sample of old weights would be clipped for being old.
Source: Hilton et al., arXiv 2110.00641; for language models AReaL, arXiv 2505.24298.
"""

import torch

from slimerl.algorithms.corrections import Weights, importance, masked_weights
from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.terms import TokenBatch


class DecoupledPpo(Grpo):
    def correction(self, tokens: TokenBatch) -> Weights:
        """The weight π_prox/μ; with `behavior_weight_cap` tokens above it are masked."""
        weight, cap = importance(tokens), self.spec.behavior_weight_cap
        above = weight > cap if cap is not None else torch.zeros_like(weight, dtype=torch.bool)
        return masked_weights(weight, above)
