"""Advantages that differ from token to token, for every micro-batch of a step.

Flows in: micro-batches that carry the samples' outcomes and the log-probabilities of the start of the step. Flows out:
the same with the advantage of each token, and the returns for a critic. Invariant: whitening takes mean and variance
over the tokens of the whole step, each counted once over all ranks, so that nothing depends on the split.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimerl.algorithms import Algorithm, StepTokens, TokenAdvantages, moments, whiten
from slimerl.training.batches import MicroBatch, pack_nothing
from slimerl.training.parallel import Grid, sum_and_max
from slimerl.training.statistics import Statistics


def with_token_advantages(
    minibatches: Sequence[Sequence[MicroBatch]], algorithm: Algorithm, grid: Grid, statistics: Statistics
) -> Sequence[Sequence[MicroBatch]]:
    """The micro-batches of all minibatches of a step, with the advantages of their tokens; called on every rank.

    They are known on the last pipeline stage; elsewhere, where no loss is computed, nothing is changed.
    Adds the algorithm's figures to `statistics`.
    """
    if not grid.is_last_stage:
        # all ranks must add up the same names, and join the sum over the ranks
        nothing = pack_nothing(grid.device)
        statistics.add_means(_advantages(nothing, algorithm).means)
        if algorithm.needs.whitening:
            _over_all_ranks(nothing.advantages, grid)
        return minibatches
    found = [[_advantages(each, algorithm) for each in minibatch] for minibatch in minibatches]
    for terms in (each for minibatch in found for each in minibatch):
        statistics.add_means(terms.means)
    values = [[terms.advantages for terms in minibatch] for minibatch in found]
    if algorithm.needs.whitening:
        total = _over_all_ranks(torch.cat([each for minibatch in values for each in minibatch]), grid)
        values = [[whiten(each, total) for each in minibatch] for minibatch in values]
    return [
        [
            replace(micro_batch, advantages=each, returns=terms.returns)
            for micro_batch, each, terms in zip(minibatch, of_tokens, of_terms, strict=True)
        ]
        for minibatch, of_tokens, of_terms in zip(minibatches, values, found, strict=True)
    ]


def _advantages(micro_batch: MicroBatch, algorithm: Algorithm) -> TokenAdvantages:
    per_token = micro_batch.advantages
    # the outcome of a sample stands at each of its tokens
    outcomes = per_token.new_zeros(micro_batch.sequences).index_copy(0, micro_batch.sequence, per_token)
    return algorithm.token_advantages(
        StepTokens(
            outcomes=outcomes,
            sequence=micro_batch.sequence,
            sequences=micro_batch.sequences,
            proximal_logprobs=micro_batch.proximal_logprobs,
            reference_logprobs=micro_batch.reference_logprobs,
            values=micro_batch.old_values,
        )
    )


def _over_all_ranks(advantages: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`moments` of the whole step: each replica's tokens once, though several of its ranks know them."""
    own = moments(advantages)
    totals, _ = sum_and_max(own, own.new_zeros(0), counts_here=grid.speaks_for_replica)
    return own.new_tensor(totals)
