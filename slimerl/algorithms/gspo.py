"""GSPO: the ratio and the clip of whole sequences, advantages as GRPO's, a mean over samples.

s_i = exp(mean_t log ρ_t); each token carries sg[s_i]·π_θ/sg[π_θ], which has the value s_i and spreads its gradient over
the tokens. Source: arXiv 2507.18071 (GSPO-token).
"""

from dataclasses import replace

import torch

from slimerl.algorithms.grpo import Grpo
from slimerl.algorithms.policy_loss import clipped_surrogate, log_ratio
from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import Needs, TokenBatch


class Gspo(Grpo):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, sequences=True)

    def surrogate(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = sequences_of(tokens, "gspo")
        policy = tokens.policy_logprobs
        mean = sequences.means(log_ratio(policy.detach(), tokens.proximal_logprobs))
        ratio = sequences.spread(mean).exp() * (policy - policy.detach()).exp()
        return clipped_surrogate(ratio, tokens.advantages, self.spec.clip_low, self.spec.clip_high)
