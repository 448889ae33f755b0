"""Corrections for the difference between the engine that sampled and the trainer, as detached weights per token."""

import torch

from slimerl.algorithms.policy_loss import log_ratio


def truncated_importance(
    proximal_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(proximal / behavior, cap): token-level truncated importance sampling (Yao et al. 2025, "off-policy RL").

    Returns:
        The weight of each token, without gradient, and 1.0 where it was truncated, else 0.0. Both [tokens].
    """
    ratio = log_ratio(proximal_logprobs.detach(), behavior_logprobs).exp()
    return ratio.clamp(max=cap), (ratio > cap).float()
