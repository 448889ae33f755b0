"""What turns rewards into a gradient: pure torch, no Megatron, no I/O.

Flows in: rewards and groups of a step; log-probabilities of sampled tokens. Flows out: advantages, one per sample or
per token; the loss of a micro-batch, as a *sum* over its tokens. Invariant: no function here divides by anything that
depends on how a step was split over micro-batches or ranks; the trainer divides once, by the global number of tokens,
and what averages otherwise carries weights made from the totals of the whole minibatch (`aggregation.py`).
"""

from slimerl.algorithms.returns import explained_variance, moments, whiten
from slimerl.algorithms.table import ALGORITHMS, algorithm_of
from slimerl.algorithms.terms import (
    Algorithm,
    BatchTotals,
    LossTerms,
    MissingInput,
    Needs,
    StepTokens,
    TokenAdvantages,
    TokenBatch,
    ValueBatch,
)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BatchTotals",
    "LossTerms",
    "MissingInput",
    "Needs",
    "StepTokens",
    "TokenAdvantages",
    "TokenBatch",
    "ValueBatch",
    "algorithm_of",
    "explained_variance",
    "moments",
    "whiten",
]
