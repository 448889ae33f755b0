"""Dr.GRPO: GRPO without its two biases: no division by the group's deviation, none by the sample's length.

A = r - mean of the group; loss = (1/S) Σ_samples Σ_t l_t / L with a constant L, never the width of a padded batch.
Source: arXiv 2503.20783.
"""

from collections.abc import Sequence

from slimerl.algorithms.advantages import group_relative
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.terms import Scores


class DrGrpo(PolicyGradient):
    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return group_relative(rewards, groups, normalize_by_std=False)
