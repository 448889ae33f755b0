"""On-policy distillation: the policy samples, a teacher scores each token.

A_t = log π_teacher - log π_prox, the negative reverse divergence KL(π ‖ π_teacher) of each token, as the advantage of
PPO's clipped loss; rewards play no part.
Source: Agarwal et al., arXiv 2306.13649; as per-token advantage "On-Policy Distillation" (Thinking Machines, 2025).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimerl.algorithms.kl import k1
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.terms import LossTerms, Needs, Scores, TokenBatch, required


class Distillation(PolicyGradient):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True)

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        """Nothing is known before the teacher has spoken."""
        return [0.0] * len(rewards), {}

    def loss(self, tokens: TokenBatch) -> LossTerms:
        divergence = self._divergence(tokens)
        terms = super().loss(replace(tokens, advantages=-divergence))
        return replace(terms, means=terms.means | {"train/teacher_kl": divergence})

    def _divergence(self, tokens: TokenBatch) -> torch.Tensor:
        teacher = required(tokens.teacher_logprobs, "teacher_logprobs", "distillation")
        return k1(tokens.proximal_logprobs, teacher).detach()
