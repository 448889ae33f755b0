"""Which rank computes which samples, in which micro-batches. Pure; every rank computes the same plan from metadata.

Flows in: the length of every sample of a step. Flows out: a `StepPlan` of sample indices.

Invariants:
    every sample stands in exactly one micro-batch of one rank;
    within a minibatch, every rank has the same number of micro-batches (Megatron's collectives need that);
    no micro-batch has more tokens than the budget, unless it is one sample alone;
    the tokens of two ranks differ by at most the longest sample of the minibatch;
    a micro-batch may be empty only where there are fewer samples than micro-batches (it is computed on padding).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer update. `ranks[r][m]`: the samples of micro-batch `m` of data-parallel rank `r`."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def samples(self) -> list[int]:
        return [sample for rank in self.ranks for micro_batch in rank for sample in micro_batch]


@dataclass(frozen=True)
class StepPlan:
    minibatches: tuple[MinibatchPlan, ...]

    def of_rank(self, rank: int) -> list[tuple[tuple[int, ...], ...]]:
        """Per minibatch, the micro-batches of one data-parallel rank."""
        return [minibatch.ranks[rank] for minibatch in self.minibatches]


def plan_step(lengths: Sequence[int], ranks: int, micro_batch_tokens: int, minibatches: int) -> StepPlan:
    """Cut a step into minibatches of consecutive samples, and each of these into micro-batches for every rank.

    Args:
        lengths: tokens of each sample, prompt and response; at least one sample.
        ranks: data-parallel ranks.
        micro_batch_tokens: the budget of one micro-batch.
        minibatches: optimizer updates of the step; at most as many as samples.

    Raises:
        ValueError: fewer samples than minibatches.
    """
    if len(lengths) < minibatches:
        raise ValueError(
            f"a step of {len(lengths)} samples cannot be cut into training.minibatches_per_step = {minibatches}"
        )
    bounds = [len(lengths) * part // minibatches for part in range(minibatches + 1)]
    return StepPlan(
        tuple(
            _plan_minibatch(lengths, range(start, stop), ranks, micro_batch_tokens) for start, stop in pairwise(bounds)
        )
    )


def _plan_minibatch(lengths: Sequence[int], samples: range, ranks: int, budget: int) -> MinibatchPlan:
    per_rank = max(1, -(-sum(lengths[sample] for sample in samples) // (ranks * budget)))
    while True:
        bins = _balanced(lengths, samples, ranks * per_rank)
        if all(len(each) <= 1 or _tokens(lengths, each) <= budget for each in bins):
            return MinibatchPlan(_deal(lengths, bins, ranks))
        per_rank += 1


def _balanced(lengths: Sequence[int], samples: range, bins: int) -> list[list[int]]:
    """Longest first, each into the lightest bin: two bins differ by at most the longest sample."""
    heap: list[tuple[int, int]] = [(0, index) for index in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for sample in sorted(samples, key=lambda each: (-lengths[each], each)):
        tokens, index = heapq.heappop(heap)
        filled[index].append(sample)
        heapq.heappush(heap, (tokens + lengths[sample], index))
    return filled


def _deal(lengths: Sequence[int], bins: list[list[int]], ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The same number of bins to each rank. Heaviest first, each round's heaviest bin to the rank that has least,
    so that two ranks never differ by more than two bins do."""
    ordered = sorted(bins, key=lambda each: -_tokens(lengths, each))
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(ordered), ranks):
        lightest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, each in zip(lightest_first, ordered[start : start + ranks], strict=True):
            dealt[rank].append(tuple(each))
            totals[rank] += _tokens(lengths, each)
    return tuple(tuple(rank) for rank in dealt)


def _tokens(lengths: Sequence[int], samples: Sequence[int]) -> int:
    return sum(lengths[sample] for sample in samples)
