"""Training of a model with a scalar head: a critic beside the policy, or a reward model by itself.

Flows in: micro-batches; of a critic's, the returns of the step. Flows out: values, changed weights, figures.
Invariant: as of the policy's step: the gradient is that of a sum over tokens divided once by their global number.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slimerl.algorithms import Algorithm, ValueBatch, explained_variance, moments
from slimerl.telemetry import trace
from slimerl.training.batches import MicroBatch, pack_nothing
from slimerl.training.parallel import Grid, sum_and_max
from slimerl.training.statistics import Statistics
from slimerl.training.step import PolicyTrainer


class ValueTrainer(PolicyTrainer):
    """The step of the policy with another model and another loss. `name`: what its figures begin with."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        schedule: Any,
        algorithm: Algorithm,
        grid: Grid,
        name: str = "train",
    ) -> None:
        super().__init__(chunks, optimizer, schedule, algorithm, grid, with_reference=False)
        self._name = name

    def with_values(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Sequence[Sequence[MicroBatch]]:
        """The micro-batches with the values under the present weights, on the last stage."""
        with trace.span("values"):
            return self._noted(minibatches, lambda each, found: replace(each, old_values=found))

    def learn(self, minibatches: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """One optimizer update per minibatch; `critic/…` figures, among them how much of the returns' variance the
        values of the start of the step explain."""
        figures = self.step(minibatches)
        each = [one for minibatch in minibatches for one in minibatch]
        nothing = pack_nothing(self._grid.device).advantages
        returns = torch.cat([nothing, *(one.returns for one in each if one.returns is not None)])
        values = torch.cat([nothing, *(one.old_values for one in each if one.old_values is not None)])
        sums = torch.cat([moments(returns), moments(returns - values)])
        totals, _ = sum_and_max(sums, sums.new_zeros(0), counts_here=self._grid.speaks_for_replica)
        of_returns, of_errors = sums.new_tensor(totals).view(2, 3)
        figures[f"{self._name}/explained_variance"] = explained_variance(of_returns, of_errors)
        figures[f"{self._name}/mean_return"] = float(of_returns[1] / of_returns[0].clamp(min=1.0))
        return figures

    def _with_logprobs(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Sequence[Sequence[MicroBatch]]:
        return minibatches

    def _with_advantages(
        self, minibatches: Sequence[Sequence[MicroBatch]], statistics: Statistics
    ) -> Sequence[Sequence[MicroBatch]]:
        return minibatches

    def _is_trained(self) -> bool:
        return True

    def _first_output(self, output: Any) -> torch.Tensor:
        values: torch.Tensor = output
        return values

    def _loss(
        self, micro_batch: MicroBatch, statistics: Statistics, output: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        values = self._whole(output, micro_batch)
        terms = self._algorithm.value_loss(
            ValueBatch(
                values=values,
                old_values=micro_batch.old_values,
                returns=micro_batch.returns,
                sequence=micro_batch.sequence,
                sequences=micro_batch.sequences,
                totals=micro_batch.totals,
                margins=micro_batch.margins,
            )
        )
        own = {f"{self._name}/loss": terms.per_token, f"{self._name}/mean_value": values}
        statistics.add(replace(terms, means=terms.means | own), micro_batch)
        return terms.per_token.sum(), self._counted(micro_batch), None

    def _name_figures(self, statistics: Statistics) -> None:
        nothing = pack_nothing(self._grid.device)
        self._loss(nothing, statistics, nothing.advantages)
