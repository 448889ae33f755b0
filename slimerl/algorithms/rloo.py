"""RLOO: each sample's baseline is the mean reward of the others of its group.

A_i = r_i - mean_{j≠i} r_j, unbiased; the clipped loss has REINFORCE's gradient while the policy is the proximal one.
Source: arXiv 2402.14740.
"""

from collections.abc import Sequence

from slimerl.algorithms.advantages import leave_one_out
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.terms import Scores


class Rloo(PolicyGradient):
    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        return leave_one_out(rewards, groups)
