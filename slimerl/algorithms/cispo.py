"""CISPO: the clipped ratio is a weight of log π_θ, so that every token keeps its gradient; advantages as GRPO's.

loss_t = -sg[clip(ρ_t, 1 - clip_low, 1 + clip_high)]·A·log π_θ; with clip_low 1, the default, there is no lower bound.
Source: MiniMax-M1 (arXiv 2506.13585); the upper bound of 5 as in "ScaleRL" (arXiv 2510.13786).
"""

import torch

from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.policy_loss import log_ratio
from slimerl.algorithms.terms import TokenBatch


class Cispo(Grpo):
    def surrogate(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The second tensor says where the weight was clipped; the gradient there is bounded, not cut off."""
        ratio = log_ratio(tokens.policy_logprobs.detach(), tokens.proximal_logprobs).exp()
        weight = ratio.clamp(1 - self.spec.clip_low, 1 + self.spec.clip_high)
        return -weight * tokens.advantages * tokens.policy_logprobs, (weight != ratio).to(ratio.dtype)
