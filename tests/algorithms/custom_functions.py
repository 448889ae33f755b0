"""Functions of a user's own, good and bad, for `algorithm.advantage_function` and `algorithm.loss_function`."""

import torch


def only_the_best(rewards, groups):
    """1 for the best of each group, else 0."""
    best = {}
    for reward, group in zip(rewards, groups, strict=True):
        best[group] = max(reward, best.get(group, reward))
    return [float(reward == best[group]) for reward, group in zip(rewards, groups, strict=True)]


def plain_policy_gradient(tokens, sharpness=1.0):
    return -sharpness * tokens.advantages * tokens.policy_logprobs


def too_few(rewards, groups):
    return [0.0]


def not_finite(rewards, groups):
    return [float("nan")] * len(rewards)


def swapped(groups, rewards):
    return list(rewards)


def mean_of_tokens(tokens):
    return -(tokens.advantages * tokens.policy_logprobs).mean()


def without_gradient(tokens):
    return -tokens.advantages * tokens.policy_logprobs.detach()


not_a_function = torch.zeros(1)
