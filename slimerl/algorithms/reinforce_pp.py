"""REINFORCE++: discounted returns without a critic, whitened over the tokens of the whole step; PPO's clipped loss.

r_t = -kl_coef·KL_t (with kl_in: reward), plus the outcome at the last token; A_t = Σ_{k≥t} γ^{k-t} r_k, whitened.
The outcome is the reward; in the baseline variant the reward minus the mean of its group.
Source: arXiv 2501.03262.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimerl.algorithms.advantages import group_relative
from slimerl.algorithms.kl import KL_ESTIMATORS
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.returns import discounted_returns, token_rewards
from slimerl.algorithms.sequences import Sequences, sequences_of
from slimerl.algorithms.terms import Needs, Scores, StepTokens, TokenAdvantages, required
from slimerl.spec.algorithm import AlgorithmSpec


class ReinforcePlusPlus(PolicyGradient):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, token_advantages=True, whitening=True)

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return list(rewards), {}

    @torch.no_grad()
    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        sequences = sequences_of(step, self.spec.name)
        rewards, means = rewards_of(step, sequences, self.spec)
        return TokenAdvantages(discounted_returns(rewards, self.spec.gamma, sequences), means=means)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return group_relative(rewards, groups, normalize_by_std=False)


def rewards_of(
    step: StepTokens, sequences: Sequences, spec: AlgorithmSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The reward of each token [tokens], the divergence taken off where it belongs into the reward; figures of it."""
    penalties, means = step.outcomes.new_zeros(len(step.sequence)), {}
    if spec.kl_coef > 0 and spec.kl_in == "reward":
        asked_by = f"{spec.name} with kl_in: reward"
        proximal = required(step.proximal_logprobs, "proximal_logprobs", asked_by)
        reference = required(step.reference_logprobs, "reference_logprobs", asked_by)
        divergence = KL_ESTIMATORS[spec.kl_estimator].estimate(proximal, reference)
        penalties = spec.kl_coef * divergence
        means["train/reference_kl"] = divergence
    return token_rewards(step.outcomes, penalties, sequences), means
