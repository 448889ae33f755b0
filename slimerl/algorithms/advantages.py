"""Advantages from the rewards of a step: samples compared with others of their group.

Flows in: rewards and group ids of a whole step. Flows out: one advantage per sample, in order.
Invariant: groups are found by id, whatever their order and size.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from slimerl.algorithms.terms import Scores

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that a group of almost equal rewards does not blow up."""


def group_relative(rewards: Sequence[float], groups: Sequence[str], normalize_by_std: bool) -> Scores:
    """(r - mean of its group) / (sample standard deviation of its group + 1e-6), the division where asked for.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300); without the division Dr.GRPO (arXiv 2503.20783).
    A group of one has advantage 0: it has nothing to be compared with.

    Args:
        rewards: one per sample.
        groups: the group id of each sample, in any order and of any size.

    Returns:
        Advantages in the order of `rewards`; figures: the share of groups of one.
    """
    members = _members(groups)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        of_group = [rewards[index] for index in indices]
        mean = fmean(of_group)
        scale = stdev(of_group) + STD_FLOOR if normalize_by_std and len(indices) > 1 else 1.0
        for index in indices:
            advantages[index] = (rewards[index] - mean) / scale
    return advantages, _figures(members)


def leave_one_out(rewards: Sequence[float], groups: Sequence[str]) -> Scores:
    """r_i - mean of the others of its group (RLOO, arXiv 2402.14740); a group of one has advantage 0."""
    members = _members(groups)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        if len(indices) == 1:
            continue
        mean = fmean([rewards[index] for index in indices])
        for index in indices:
            # r_i - (G·mean - r_i) / (G - 1)
            advantages[index] = (rewards[index] - mean) * len(indices) / (len(indices) - 1)
    return advantages, _figures(members)


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    return members


def _figures(members: dict[str, list[int]]) -> dict[str, float]:
    alone = sum(len(indices) == 1 for indices in members.values())
    return {"train/groups_of_one_fraction": alone / max(1, len(members))}
