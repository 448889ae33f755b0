"""Figures of a step over all micro-batches and ranks.

Flows in: per-token tensors of each micro-batch. Flows out: means over the tokens of the whole step, and maxima.
Invariant: sums are added up and divided once, by the number of tokens of all ranks, so that the figures do not
depend on the split.
"""

from collections.abc import Mapping

import torch

from slimerl.algorithms import LossTerms
from slimerl.training.batches import MicroBatch
from slimerl.training.parallel import sum_and_max

_SAMPLED, _COMPUTED, _PADDING = "sampled", "computed", "padding"


class Statistics:
    """Adds up one step. The same names must be added on every rank (a loss names them also for no tokens)."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._counts = {_SAMPLED: 0, _COMPUTED: 0, _PADDING: 0}

    def add(self, terms: LossTerms, micro_batch: MicroBatch) -> None:
        self.add_means(terms.means)
        for name, values in terms.maxima.items():
            highest = values.detach().double().max() if values.numel() else values.new_zeros((), dtype=torch.float64)
            self._maxima[name] = torch.maximum(self._maxima.get(name, highest), highest)
        self._counts[_SAMPLED] += micro_batch.sampled_tokens
        self._counts[_COMPUTED] += micro_batch.computed_tokens
        self._counts[_PADDING] += micro_batch.padding_tokens

    def add_means(self, means: Mapping[str, torch.Tensor]) -> None:
        """Further [tokens] tensors of tokens that `add` counts."""
        for name, values in means.items():
            self._sums[name] = self._sums.get(name, 0) + values.detach().double().sum()

    def reduced(self, counts_here: bool) -> dict[str, float]:
        """The figures over all ranks; `counts_here`: this rank adds its sums (one rank of each replica does)."""
        names, highest = sorted(self._sums), sorted(self._maxima)
        counts = torch.tensor([float(count) for count in self._counts.values()], dtype=torch.float64)
        device = self._sums[names[0]].device if names else counts.device
        sums = torch.cat([counts.to(device), *(self._sums[name][None] for name in names)])
        maxima = torch.stack([self._maxima[name] for name in highest]) if highest else sums.new_zeros(0)
        totals, tops = sum_and_max(sums, maxima, counts_here)
        sampled, computed, padding = totals[: len(counts)]
        figures = {name: total / max(1.0, sampled) for name, total in zip(names, totals[len(counts) :], strict=True)}
        figures |= dict(zip(highest, tops, strict=True))
        figures["train/sampled_tokens"] = sampled
        figures["train/computed_tokens"] = computed
        figures["train/padding_share"] = padding / max(1.0, computed)
        return figures
