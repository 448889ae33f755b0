"""PPO with a critic: advantages by GAE, whitened over the tokens of the whole step; clipped policy and value losses.

Order matters: the critic's returns R = A + V are taken before A is whitened.
Source: Schulman et al., arXiv 1707.06347; GAE arXiv 1506.02438; the reward per token as in arXiv 1909.08593.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.reinforce_pp import rewards_of
from slimerl.algorithms.returns import generalized_advantages
from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import LossTerms, Needs, Scores, StepTokens, TokenAdvantages, ValueBatch, required


class Ppo(PolicyGradient):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, token_advantages=True, whitening=True, critic=True)

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return list(rewards), {}

    @torch.no_grad()
    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        sequences = sequences_of(step, "ppo")
        values = required(step.values, "values", "ppo")
        rewards, means = rewards_of(step, sequences, self.spec)
        advantages, returns = generalized_advantages(rewards, values, self.spec.gamma, self.spec.gae_lambda, sequences)
        return TokenAdvantages(advantages, returns, means)

    def value_loss(self, tokens: ValueBatch) -> LossTerms:
        old_values = required(tokens.old_values, "old_values", "ppo's critic")
        returns = required(tokens.returns, "returns", "ppo's critic")
        per_token, clipped = clipped_value_loss(tokens.values, old_values, returns, self.spec.value_clip)
        error = (tokens.values.detach() - returns).abs()
        return LossTerms(per_token, {"critic/clip_fraction": clipped, "critic/mean_abs_error": error})

    def trains_policy(self, step: int) -> bool:
        """After `value_warmup_steps` steps of the critic alone: the advantages of an untaught critic are noise."""
        return step > self.spec.value_warmup_steps


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """½·max((V - R)², (clip(V, V_old ± clip) - R)²); and 1.0 where the clip cuts the gradient off. Both [tokens]."""
    free = (values - returns).square()
    moved = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (moved - returns).square()
    return torch.maximum(free, clipped) / 2, (clipped > free).to(values.dtype)
