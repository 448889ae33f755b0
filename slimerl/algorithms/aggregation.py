"""What a loss averages over, as a weight for each token.

Flows in: a micro-batch and the totals of its minibatch. Flows out: [tokens] weights w such that
Σ w·l / (tokens of the minibatch) is the wanted average of l.
Invariant: a weight depends on its own sample and on the totals alone, so that the gradient is the same for every split
over micro-batches and ranks. A mean over a micro-batch or a rank would not be.
"""

import torch

from slimerl.algorithms.sequences import sequences_of
from slimerl.algorithms.terms import TokenBatch, required_totals
from slimerl.spec.algorithm import AlgorithmSpec


def token_weights(tokens: TokenBatch, spec: AlgorithmSpec) -> torch.Tensor:
    """Weights [tokens] of `spec.aggregation`, with T tokens and S samples in the minibatch, |y| tokens in the sample:

    token_mean: 1, giving Σ_t l / T (DAPO).
    sequence_mean: T / (S·|y|), giving the mean over samples of each one's token mean (GRPO as published, GSPO).
    constant_length: T / (S·L), giving the mean over samples of the token sum divided by the constant L (Dr.GRPO).

    Raises:
        MissingInput: the totals, or the samples of the tokens, are needed and not there.
    """
    ones = torch.ones_like(tokens.advantages)
    if spec.aggregation == "token_mean":
        return ones
    totals = required_totals(tokens.totals, spec.name)
    per_sample = totals.tokens / totals.sequences
    if spec.aggregation == "constant_length":
        assert spec.loss_length_tokens is not None  # the spec admits no other
        return ones * (per_sample / spec.loss_length_tokens)
    sequences = sequences_of(tokens, spec.name)
    return ones * per_sample / sequences.spread(sequences.lengths)
