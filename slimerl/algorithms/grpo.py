"""GRPO: samples of one prompt compared with each other, PPO's clipped loss, no critic.

A = (r - mean of the group) / (std of the group + 1e-6), at every token.
Source: DeepSeekMath (arXiv 2402.03300). As published it averages over samples (`aggregation: sequence_mean`) and clips
alike on both sides; the defaults are DAPO's token mean and higher upper clip.
"""

from collections.abc import Sequence

from slimerl.algorithms.advantages import group_relative
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.terms import Scores


class Grpo(PolicyGradient):
    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return group_relative(rewards, groups, self.spec.normalize_by_std)
