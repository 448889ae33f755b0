"""Advantages and returns that differ from token to token, and their whitening over all ranks.

Flows in: the outcome of each sample, per-token rewards, values. Flows out: per-token advantages.
Invariant: what is computed of a sample needs that sample alone; what is taken over the whole step goes through
`moments`, which add up over any split.

Tool tokens are not in the tensors, so A and V of the next sampled token pass over them unchanged.
"""

import torch

from slimerl.algorithms.sequences import Sequences

VARIANCE_FLOOR = 1e-8
"""Added to the variance: a step of equal advantages is whitened to zeros."""


def token_rewards(outcomes: torch.Tensor, penalties: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """[tokens]: minus the penalty of each token, plus the outcome [sequences] at the last token of its sample."""
    return (-penalties).index_add(0, sequences.ends, outcomes.to(penalties.dtype))


def discounted_returns(rewards: torch.Tensor, gamma: float, sequences: Sequences) -> torch.Tensor:
    """G_t = Σ_{k≥t} γ^{k-t} r_k within each sample; [tokens]."""
    return sequences.tokens(_discounted_suffix_sums(sequences.rows(rewards), gamma))


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float, sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ_t = r_t + γ·V_{t+1} - V_t, A_t = δ_t + γλ·A_{t+1}, R = A + V (GAE, Schulman et al., arXiv 1506.02438).

    Behind the last token of a sample there is nothing of value. Returns A (not whitened) and R, both [tokens].
    """
    value_rows = sequences.rows(values)
    following = torch.cat([value_rows[:, 1:], value_rows.new_zeros(sequences.count, 1)], dim=1)
    deltas = sequences.rows(rewards) + gamma * following[:, : value_rows.shape[1]] - value_rows
    advantages = sequences.tokens(_discounted_suffix_sums(deltas, gamma * lam))
    return advantages, advantages + values


def _discounted_suffix_sums(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """y_t = x_t + factor·y_{t+1} along the rows, in log₂(length) whole-tensor steps.

    After the step with `shift`, y_t is the sum over its own and the next 2·shift - 1 entries.
    """
    shift = 1
    while shift < rows.shape[1]:
        later = torch.cat([rows[:, shift:], rows.new_zeros(rows.shape[0], shift)], dim=1)
        rows = rows + factor**shift * later
        shift *= 2
    return rows


def moments(values: torch.Tensor) -> torch.Tensor:
    """[count, Σ, Σ of squares] in float64; those of parts add up to those of the whole (all-reduce: sum)."""
    exact = values.detach().double()
    return torch.stack([exact.new_tensor(float(exact.numel())), exact.sum(), exact.square().sum()])


def whiten(values: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(x - mean) / √(variance + 1e-8), mean and population variance from the `moments` of all tokens of the step."""
    mean = total[1] / total[0].clamp(min=1.0)
    return ((values.double() - mean) / (_variance(total) + VARIANCE_FLOOR).sqrt()).to(values.dtype)


def explained_variance(of_returns: torch.Tensor, of_errors: torch.Tensor) -> float:
    """1 - Var(R - V) / Var(R), from the `moments` of both over all tokens of the step: 1 for a critic that knows the
    returns, 0 for one that knows their mean alone. 0 where all returns are equal."""
    of_return, of_error = (_variance(each) for each in (of_returns, of_errors))
    return 1 - float(of_error / of_return) if of_return > VARIANCE_FLOOR else 0.0


def _variance(total: torch.Tensor) -> torch.Tensor:
    """Of the population, from `moments`."""
    count = total[0].clamp(min=1.0)
    return (total[2] / count - (total[1] / count).square()).clamp(min=0.0)
