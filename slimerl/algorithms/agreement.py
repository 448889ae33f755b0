"""How far the engine that sampled and the trainer are apart, per token."""

import torch

from slimerl.algorithms.policy_loss import log_ratio


def k3(policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = policy / behavior: for x ~ behavior an unbiased estimate of KL(behavior ‖ policy) in nats
    that is never negative (Schulman, "Approximating KL divergence")."""
    log_r = log_ratio(policy_logprobs.detach(), behavior_logprobs)
    return log_r.exp() - 1 - log_r
