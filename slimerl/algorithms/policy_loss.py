"""Losses of a policy given advantages; per token, not aggregated."""

import torch

LOG_RATIO_BOUND = 20.0
"""exp stays finite in float32; a ratio of e^20 is clipped in any case."""

DUAL_CLIP = 3.0
"""A token with a negative advantage counts at most as if its ratio were this (Ye et al., arXiv 1912.09729)."""


def log_ratio(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """log(policy / reference), bounded."""
    return (policy_logprobs - reference_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_policy_loss(
    policy_logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate with separate bounds and dual clip (Schulman et al., arXiv 1707.06347; DAPO, 2503.14476).

    Returns:
        The loss of each token, and 1.0 for each token whose gradient is cut off by a clip, else 0.0. All [tokens].
    """
    ratio = log_ratio(policy_logprobs, proximal_logprobs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    bound = -advantages * DUAL_CLIP
    dual = (advantages < 0) & (loss > bound)
    return torch.where(dual, bound, loss), torch.maximum(clipped, dual.to(clipped.dtype))


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A·ratio, -A·clip(ratio, 1 - clip_low, 1 + clip_high)); returns as `clipped_policy_loss`."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), (clipped > free).to(ratio.dtype)
