"""Corrections for the difference between the engine that sampled and the trainer, as detached weights per token.

Flows in: proximal and behaviour log-probabilities; w = proximal / behaviour. Flows out: a weight for each token.
Invariant: no gradient flows through a weight, and a masked token still counts in every divisor: masking makes a step
smaller, it does not make the remaining tokens weigh more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimerl.algorithms.policy_loss import LOG_RATIO_BOUND, log_ratio
from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import TokenBatch
from slimerl.spec.algorithm import AlgorithmSpec


@dataclass(frozen=True)
class Weights:
    """`weight` of each token; `truncated` and `masked`: 1.0 where the weight was capped or set to 0, else 0.0."""

    weight: torch.Tensor
    truncated: torch.Tensor
    masked: torch.Tensor


def truncated_importance(tokens: TokenBatch, spec: AlgorithmSpec) -> Weights:
    ratio = importance(tokens)
    return _capped(ratio, spec.correction_cap)


def truncated_sequence_importance(tokens: TokenBatch, spec: AlgorithmSpec) -> Weights:
    sequences = sequences_of(tokens, "correction sequence_tis")
    product = sequences.sums(tokens.proximal_logprobs.detach() - tokens.behavior_logprobs)
    ratio = product.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _capped(sequences.spread(ratio), spec.correction_cap)


def masked_importance(tokens: TokenBatch, spec: AlgorithmSpec) -> Weights:
    ratio = importance(tokens)
    return masked_weights(ratio, (ratio < spec.correction_low) | (ratio > spec.correction_high))


def geometric_rejection(tokens: TokenBatch, spec: AlgorithmSpec) -> Weights:
    sequences = sequences_of(tokens, "correction geometric_rejection")
    mean = sequences.means(tokens.proximal_logprobs.detach() - tokens.behavior_logprobs)
    rejected = sequences.spread(mean.abs() > spec.geometric_tolerance)
    return masked_weights(torch.ones_like(tokens.behavior_logprobs), rejected)


def importance(tokens: TokenBatch) -> torch.Tensor:
    """w = proximal / behaviour, [tokens], without gradient."""
    return log_ratio(tokens.proximal_logprobs.detach(), tokens.behavior_logprobs).exp()


def masked_weights(weight: torch.Tensor, masked: torch.Tensor) -> Weights:
    """The weights, 0 where `masked` (bool) says so."""
    return Weights(weight.masked_fill(masked, 0.0), torch.zeros_like(weight), masked.to(weight.dtype))


def _capped(ratio: torch.Tensor, cap: float) -> Weights:
    return Weights(ratio.clamp(max=cap), (ratio > cap).to(ratio.dtype), torch.zeros_like(ratio))


@dataclass(frozen=True)
class CorrectionEntry:
    weights: Callable[[TokenBatch, AlgorithmSpec], Weights]
    formula: str
    source: str
    by_sequence: bool = False


CORRECTIONS: dict[str, CorrectionEntry] = {
    "token_tis": CorrectionEntry(
        truncated_importance, "min(w_t, cap)", "Yao et al. 2025, truncated importance sampling"
    ),
    "sequence_tis": CorrectionEntry(
        truncated_sequence_importance, "min(Π_t w_t, cap), cap 2 to 10", "Liu et al. 2025, sequence-level TIS", True
    ),
    "mis": CorrectionEntry(
        masked_importance, "w_t, 0 outside [low, high]", "Liu et al. 2025, masked importance sampling"
    ),
    "icepop": CorrectionEntry(
        masked_importance, "w_t, 0 outside [low, high]; MIS with wider bounds", "IcePop, Ring-1T (arXiv 2510.18855)"
    ),
    "geometric_rejection": CorrectionEntry(
        geometric_rejection,
        "1, 0 where |mean_t log w_t| > tolerance",
        "Liu et al. 2025, geometric-mean rejection",
        True,
    ),
}
"""`algorithm.correction` (but `none`) → weights, formula, source, and whether samples must be known."""
