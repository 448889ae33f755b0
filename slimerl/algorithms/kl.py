"""Estimates of the divergence KL(policy ‖ reference) in nats from sampled tokens, x ~ policy, r = reference / policy.

Source: Schulman, "Approximating KL divergence"; gradients: Tang and Munos, arXiv 2506.09477.
Pitfall: an estimator with the right mean may have the wrong gradient. Over x ~ policy the gradient of k1 is zero on
average, that of k3 is the gradient of the other direction, KL(reference ‖ policy); that of k2 is right.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimerl.algorithms.policy_loss import log_ratio
from slimerl.spec.algorithm import KlEstimator


def k1(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of either sign. For the reward."""
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """½ log² r: biased, its gradient is not. For the loss."""
    return (policy_logprobs - reference_logprobs).square() / 2


def k3(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r: unbiased and never negative. To be looked at."""
    log_r = log_ratio(reference_logprobs, policy_logprobs)
    return log_r.exp() - 1 - log_r


def k3_with_gradient_of_k2(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The value of k3 and the gradient of k2. For the loss."""
    right_gradient = k2(policy_logprobs, reference_logprobs)
    return right_gradient + (k3(policy_logprobs, reference_logprobs) - right_gradient).detach()


@dataclass(frozen=True)
class Estimator:
    estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    formula: str
    in_loss: str
    in_reward: str


KL_ESTIMATORS: dict[KlEstimator, Estimator] = {
    "k1": Estimator(k1, "−log r", "refused: its expected gradient is zero", "unbiased; the default"),
    "k2": Estimator(k2, "½ log² r", "right gradient", "biased"),
    "k3": Estimator(k3, "r − 1 − log r", "gradient of KL(π_ref ‖ π_θ); as GRPO was published", "unbiased, ≥ 0"),
    "k3+": Estimator(
        k3_with_gradient_of_k2,
        "value of k3, gradient of k2",
        "right gradient; the default",
        "refused: no gradient there",
    ),
}
"""`algorithm.kl_estimator` → how it is computed, and what it is good for (r = π_ref / π_θ)."""
