"""Which rank computes which samples, in which micro-batches. Pure; every rank computes the same plan from metadata.

Flows in: the lengths of every sample of a step, and which samples share a prompt. Flows out: a `StepPlan` of sample
indices.

Invariants:
    every sample stands in exactly one micro-batch of one rank;
    within a minibatch, every rank has the same number of micro-batches (Megatron's collectives need that);
    no micro-batch has more tokens than the budget, unless it is one sample (or pair) alone;
    the costs of two ranks differ by at most the most expensive unit (sample, or samples that share a prompt);
    a micro-batch is empty (it is computed on padding) only where the last round, one for each rank times `multiple`,
    has more places than units are left.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slimerl.algorithms import BatchTotals


@dataclass(frozen=True)
class SampleShape:
    """Tokens of one sample. Samples of one `group` are answers to one task."""

    prompt: int
    response: int
    group: Hashable
    sampled: int = 0
    """Tokens of the response that the policy sampled."""
    prefix: Hashable = None
    """Samples of a group that agree in it have the same prompt."""

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class PackingRules:
    """How a step is cut.

    Args:
        ranks: data-parallel ranks.
        micro_batch_tokens: the budget of one micro-batch.
        shared_prefix: samples of a group that stand in one micro-batch compute their prompt once.
        pair_cost: what one pair of query and key costs in attention, where a token costs 1 elsewhere (`cost.py`).
        multiple: of the number of micro-batches (the interleaved pipeline schedule needs whole rounds).
        pairs: samples 2k and 2k + 1 are a pair, and stand in one micro-batch, in this order.
    """

    ranks: int
    micro_batch_tokens: int
    shared_prefix: bool = False
    pair_cost: float = 0.0
    multiple: int = 1
    pairs: bool = False


@dataclass(frozen=True)
class MinibatchPlan:
    """One optimizer update. `ranks[r][m]`: the samples of micro-batch `m` of data-parallel rank `r`."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    totals: BatchTotals

    @property
    def samples(self) -> list[int]:
        return [sample for rank in self.ranks for micro_batch in rank for sample in micro_batch]


@dataclass(frozen=True)
class StepPlan:
    minibatches: tuple[MinibatchPlan, ...]

    def of_rank(self, rank: int) -> list[tuple[tuple[int, ...], ...]]:
        """Per minibatch, the micro-batches of one data-parallel rank."""
        return [minibatch.ranks[rank] for minibatch in self.minibatches]


def plan_step(shapes: Sequence[SampleShape], rules: PackingRules, minibatches: int) -> StepPlan:
    """Cut a step into minibatches of consecutive samples, and each of these into micro-batches for every rank.

    Args:
        shapes: of each sample; at least one.
        minibatches: optimizer updates of the step; at most as many as samples, or pairs.

    Raises:
        ValueError: fewer samples than minibatches.
    """
    together = 2 if rules.pairs else 1
    if len(shapes) < minibatches * together:
        raise ValueError(
            f"a step of {len(shapes)} samples cannot be cut into training.minibatches_per_step = {minibatches}"
        )
    bounds = [len(shapes) // together * part // minibatches * together for part in range(minibatches + 1)]
    return StepPlan(tuple(_plan_minibatch(shapes, range(start, stop), rules) for start, stop in pairwise(bounds)))


@dataclass(frozen=True)
class _Unit:
    """Samples that are computed together, with one prompt where it is shared."""

    samples: tuple[int, ...]
    tokens: int
    cost: float


def _plan_minibatch(shapes: Sequence[SampleShape], samples: range, rules: PackingRules) -> MinibatchPlan:
    """Of the ways to cut groups into parts, the one whose busiest rank has least to do."""
    best: tuple[float, list[list[list[_Unit]]]] | None = None
    for units in _ways_to_cut(shapes, samples, rules):
        dealt = _deal(_fill(units, rules), rules.ranks)
        busiest = max(sum(map(_cost, rank)) for rank in dealt)
        if best is None or busiest < best[0]:
            best = busiest, dealt
    assert best is not None
    ranks = [[[sample for unit in each for sample in unit.samples] for each in rank] for rank in best[1]]
    return MinibatchPlan(tuple(tuple(map(tuple, rank)) for rank in ranks), _totals([shapes[i] for i in samples]))


def _totals(shapes: Sequence[SampleShape]) -> BatchTotals:
    return BatchTotals(sum(each.sampled for each in shapes), len(shapes), len({each.group for each in shapes}))


def _ways_to_cut(shapes: Sequence[SampleShape], samples: range, rules: PackingRules) -> Iterator[list[_Unit]]:
    """Whole groups, halves, quarters … down to single samples, but nothing that exceeds the budget; pairs are whole."""
    if rules.pairs:
        yield [_unit(shapes, [each, each + 1], rules) for each in samples[::2]]
        return
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for sample in samples:
        shape = shapes[sample]
        groups[(shape.group, shape.prefix) if rules.shared_prefix else sample].append(sample)
    largest = max(map(len, groups.values()))
    parts = 1
    while True:
        units = [_unit(shapes, each, rules) for group in groups.values() for each in _parts(shapes, group, parts)]
        if all(len(unit.samples) == 1 or unit.tokens <= rules.micro_batch_tokens for unit in units):
            yield units
        if parts >= largest:
            return
        parts = min(2 * parts, largest)


def _parts(shapes: Sequence[SampleShape], group: Sequence[int], parts: int) -> list[list[int]]:
    """At most `parts` parts of similar length: longest first, each into the shortest part."""
    filled: list[list[int]] = [[] for _ in range(min(parts, len(group)))]
    heap = [(0, number) for number in range(len(filled))]
    for sample in sorted(group, key=lambda each: (-shapes[each].response, each)):
        tokens, number = heapq.heappop(heap)
        filled[number].append(sample)
        # a sample without a response still takes a place
        heapq.heappush(heap, (tokens + max(1, shapes[sample].response), number))
    return filled


def _unit(shapes: Sequence[SampleShape], samples: Sequence[int], rules: PackingRules) -> _Unit:
    prompt = shapes[samples[0]].prompt
    responses = [shapes[sample].response for sample in samples]
    prompts = prompt if rules.shared_prefix else prompt * len(samples)
    tokens = prompts + sum(responses)
    pairs = prompts * prompt / 2 + sum(each * prompt + each**2 / 2 for each in responses)
    return _Unit(tuple(samples), tokens, tokens + rules.pair_cost * pairs)


def _fill(units: list[_Unit], rules: PackingRules) -> list[list[_Unit]]:
    """The same number of micro-batches for each rank: the fewest in which balanced ones keep the budget."""
    per_rank = max(1, -(-_fewest(units, rules.micro_batch_tokens) // rules.ranks))
    while True:
        per_rank = -(-per_rank // rules.multiple) * rules.multiple
        bins = _balanced(units, rules.ranks * per_rank)
        if all(_fits(each, rules.micro_batch_tokens) for each in bins):
            return bins
        per_rank += 1


def _fewest(units: Sequence[_Unit], budget: int) -> int:
    """No fewer micro-batches hold them: what exceeds the budget takes one each, however long it is."""
    within = [unit.tokens for unit in units if unit.tokens <= budget]
    return len(units) - len(within) - (-sum(within) // budget)


def _fits(units: Sequence[_Unit], budget: int) -> bool:
    return len(units) <= 1 or sum(unit.tokens for unit in units) <= budget


def _balanced(units: Sequence[_Unit], bins: int) -> list[list[_Unit]]:
    """Most expensive first, each into the lightest bin: two bins differ by at most the most expensive unit."""
    heap: list[tuple[float, int]] = [(0.0, index) for index in range(bins)]
    filled: list[list[_Unit]] = [[] for _ in range(bins)]
    for unit in sorted(units, key=lambda each: (-each.cost, each.samples)):
        cost, index = heapq.heappop(heap)
        filled[index].append(unit)
        heapq.heappush(heap, (cost + unit.cost, index))
    return filled


def _deal(bins: list[list[_Unit]], ranks: int) -> list[list[list[_Unit]]]:
    """The same number of bins to each rank. Heaviest first, each round's heaviest bin to the rank that has least,
    so that two ranks never differ by more than two bins do."""
    ordered = sorted(bins, key=lambda each: -_cost(each))
    dealt: list[list[list[_Unit]]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        lightest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, each in zip(lightest_first, ordered[start : start + ranks], strict=True):
            dealt[rank].append(each)
            totals[rank] += _cost(each)
    return dealt


def _cost(units: Sequence[_Unit]) -> float:
    return sum(unit.cost for unit in units)
