"""The formulas written out sample by sample and token by token, without any code of the package.

Everything works on the whole responses of a `Step` and steps over the tokens that do not count. `policy` and `entropy`
are lists of lists of scalar tensors, so that PyTorch gives the gradient of each formula as it stands here.
"""

import math

import torch

from slimerl.spec.schema import AlgorithmSpec


def counting(step):
    """(sample, place) of each token that counts."""
    return [(i, t) for i in range(len(step.rewards)) for t in range(len(step.sampled[i])) if step.sampled[i][t]]


def scalars(rows):
    return [[torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in row] for row in rows]


def sample_advantages(step, spec):
    found = []
    for i, reward in enumerate(step.rewards):
        group = [j for j in range(len(step.rewards)) if step.groups[j] == step.groups[i]]
        mean = sum(step.rewards[j] for j in group) / len(group)
        if len(group) == 1:
            found.append(0.0)
        elif spec.name == "rloo":
            others = [step.rewards[j] for j in group if j != i]
            found.append(reward - sum(others) / len(others))
        elif spec.name == "dr_grpo" or not spec.normalize_by_std:
            found.append(reward - mean)
        else:
            deviation = math.sqrt(sum((step.rewards[j] - mean) ** 2 for j in group) / (len(group) - 1))
            found.append((reward - mean) / (deviation + 1e-6))
    return found


def estimate(name, policy, reference):
    """Of KL(policy ‖ reference); numbers or tensors."""
    log_r = reference - policy
    ratio = log_r.exp() if isinstance(log_r, torch.Tensor) else math.exp(log_r)
    return {"k1": -log_r, "k2": log_r * log_r / 2, "k3": ratio - 1 - log_r}[name]


def token_rewards(step, spec, outcomes):
    """rewards[i][t], None on tokens that do not count."""
    rewards = [[None] * len(mask) for mask in step.sampled]
    for i, t in counting(step):
        penalty = 0.0
        if spec.kl_in == "reward":
            penalty = spec.kl_coef * estimate(spec.kl_estimator, step.proximal[i][t], step.reference[i][t])
        rewards[i][t] = -penalty
    for i, outcome in enumerate(outcomes):
        last = max(t for t, counts in enumerate(step.sampled[i]) if counts)
        rewards[i][last] += outcome
    return rewards


def returns_to_go(step, spec, outcomes):
    """Before whitening."""
    rewards = token_rewards(step, spec, outcomes)
    found = [[0.0] * len(mask) for mask in step.sampled]
    for i, mask in enumerate(step.sampled):
        following = 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                following = rewards[i][t] + spec.gamma * following
                found[i][t] = following
    return found


def gae(step, spec, outcomes):
    """(advantages before whitening, returns)."""
    rewards = token_rewards(step, spec, outcomes)
    advantages = [[0.0] * len(mask) for mask in step.sampled]
    returns = [[0.0] * len(mask) for mask in step.sampled]
    for i, mask in enumerate(step.sampled):
        next_advantage = next_value = 0.0  # carried over tool tokens unchanged
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            delta = rewards[i][t] + spec.gamma * next_value - step.values[i][t]
            next_advantage = delta + spec.gamma * spec.gae_lambda * next_advantage
            next_value = step.values[i][t]
            advantages[i][t], returns[i][t] = next_advantage, next_advantage + next_value
    return advantages, returns


def whitened(step, advantages):
    tokens = counting(step)
    mean = sum(advantages[i][t] for i, t in tokens) / len(tokens)
    variance = sum((advantages[i][t] - mean) ** 2 for i, t in tokens) / len(tokens)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in advantages]


def token_advantages(step, spec):
    """advantages[i][t] as the loss sees them."""
    if spec.name == "ppo":
        return whitened(step, gae(step, spec, step.rewards)[0])
    if spec.name == "reinforce_pp":
        return whitened(step, returns_to_go(step, spec, step.rewards))
    if spec.name == "reinforce_pp_baseline":
        centred = sample_advantages(step, AlgorithmSpec(normalize_by_std=False))
        return whitened(step, returns_to_go(step, spec, centred))
    if spec.name == "distillation":
        return [
            [teacher - proximal for teacher, proximal in zip(*rows, strict=True)]
            for rows in zip(step.teacher, step.proximal, strict=True)
        ]
    of_samples = sample_advantages(step, spec)
    return [[advantage] * len(mask) for advantage, mask in zip(of_samples, step.sampled, strict=True)]


def clip(value, low, high):
    return torch.clamp(value, min=low, max=high)


def surrogate(step, spec, policy, advantages, i, t):
    denominator = step.behavior if spec.proximal == "behavior" else step.proximal
    advantage, low, high = advantages[i][t], 1 - spec.clip_low, 1 + spec.clip_high
    if spec.name == "gspo":
        places = [s for s in range(len(step.sampled[i])) if step.sampled[i][s]]
        mean = sum((policy[i][s] - denominator[i][s]) for s in places) / len(places)
        s_i = mean.exp().detach() * (policy[i][t] - policy[i][t].detach()).exp()
        return -torch.minimum(s_i * advantage, clip(s_i, low, high) * advantage)
    ratio = (policy[i][t] - denominator[i][t]).exp()
    if spec.name == "cispo":
        return -clip(ratio, low, high).detach() * advantage * policy[i][t]
    objective = torch.minimum(ratio * advantage, clip(ratio, low, high) * advantage)
    if advantage < 0:
        objective = torch.maximum(objective, torch.tensor(3.0 * advantage, dtype=torch.float64))
    return -objective


def weight(step, spec, i, t):
    """The train-inference correction of a token."""
    ratio = math.exp(step.proximal[i][t] - step.behavior[i][t])
    places = [s for s in range(len(step.sampled[i])) if step.sampled[i][s]]
    log_ratios = [step.proximal[i][s] - step.behavior[i][s] for s in places]
    if spec.name == "decoupled_ppo":
        return 0.0 if spec.behavior_weight_cap is not None and ratio > spec.behavior_weight_cap else ratio
    if spec.correction == "token_tis":
        return min(ratio, spec.correction_cap)
    if spec.correction == "sequence_tis":
        return min(math.prod(math.exp(each) for each in log_ratios), spec.correction_cap)
    if spec.correction in ("mis", "icepop"):
        return ratio if spec.correction_low <= ratio <= spec.correction_high else 0.0
    if spec.correction == "geometric_rejection":
        return 1.0 if abs(sum(log_ratios) / len(log_ratios)) <= spec.geometric_tolerance else 0.0
    return 1.0


def policy_loss(step, spec, policy, entropy):
    """The loss of the whole step as its formula says, a scalar tensor."""
    advantages = token_advantages(step, spec)
    losses = {}
    for i, t in counting(step):
        loss = weight(step, spec, i, t) * surrogate(step, spec, policy, advantages, i, t)
        if spec.kl_coef and spec.kl_in == "loss":
            if spec.kl_estimator == "k3+":
                gradient = estimate("k2", policy[i][t], step.reference[i][t])
                value = estimate("k3", policy[i][t], step.reference[i][t]).detach()
                divergence = gradient - gradient.detach() + value
            else:
                divergence = estimate(spec.kl_estimator, policy[i][t], step.reference[i][t])
            loss = loss + spec.kl_coef * divergence
        losses[i, t] = loss - spec.entropy_coef * entropy[i][t]
    return average(step, spec, losses)


def average(step, spec, losses):
    if spec.aggregation == "token_mean":
        return sum(losses.values()) / len(losses)
    total = 0.0
    for i in range(len(step.rewards)):
        of_sample = [loss for (sample, _), loss in losses.items() if sample == i]
        divisor = len(of_sample) if spec.aggregation == "sequence_mean" else spec.loss_length_tokens
        total = total + sum(of_sample) / divisor
    return total / len(step.rewards)


def dpo_loss(step, beta, policy):
    losses = []
    for k in range(0, len(step.rewards), 2):
        sums = []
        for i in (k, k + 1):
            places = [t for t in range(len(step.sampled[i])) if step.sampled[i][t]]
            sums.append(sum(policy[i][t] - step.reference[i][t] for t in places))
        losses.append(-torch.log(1 / (1 + torch.exp(-beta * (sums[0] - sums[1])))))
    return sum(losses) / len(losses)


def bradley_terry_loss(step, values, margins):
    losses = []
    for k in range(0, len(step.rewards), 2):
        scores = []
        for i in (k, k + 1):
            last = max(t for t in range(len(step.sampled[i])) if step.sampled[i][t])
            scores.append(values[i][last])
        losses.append(-torch.log(1 / (1 + torch.exp(-(scores[0] - scores[1] - margins[k // 2])))))
    return sum(losses) / len(losses)


def value_loss(step, clip_range, values):
    losses = []
    for i, t in counting(step):
        old, target = step.old_values[i][t], step.returns[i][t]
        free = (values[i][t] - target) ** 2
        clipped = (clip(values[i][t], old - clip_range, old + clip_range) - target) ** 2
        losses.append(0.5 * torch.maximum(free, clipped))
    return sum(losses) / len(losses)
