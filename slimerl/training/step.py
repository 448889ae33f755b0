"""One training step: log-probabilities, loss, gradient, update, over Megatron's schedules.

Flows in: the micro-batches of this rank, grouped into minibatches. Flows out: changed weights and the step's figures.
Invariant: the gradient of a minibatch is that of (sum of the losses of its sampled tokens) / (number of sampled
tokens over all ranks), however it is split over micro-batches and ranks: each micro-batch's loss is a plain sum, the
data-parallel reduction adds, and Megatron's finalize_model_grads divides once by the all-reduced number of tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slimerl.algorithms import Algorithm, TokenBatch
from slimerl.training.batches import MicroBatch
from slimerl.training.parallel import Grid
from slimerl.training.statistics import Statistics

LossFunction = Callable[[Any], tuple[torch.Tensor, torch.Tensor, Any]]


class NotFinite(ArithmeticError):
    """The gradient is not a number; the weights must not be used any more."""


class PolicyTrainer:
    """Owns the model chunks, the optimizer and the schedule of this rank. Every method is called on every rank."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: Any, schedule: Any, algorithm: Algorithm, grid: Grid
    ) -> None:
        self.chunks = list(chunks)
        self._optimizer = optimizer
        self._schedule = schedule
        self._algorithm = algorithm
        self._grid = grid
        for chunk in self.chunks:
            chunk.config.grad_scale_func = optimizer.scale_loss  # type: ignore[union-attr]
            chunk.train()

    def step(self, minibatches: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """One optimizer update per minibatch.

        With several minibatches the proximal log-probabilities are computed first, with the weights at the start of
        the step; with one they equal the policy's own, and no pass is spent on them.

        Returns:
            Figures of the whole step, the same on every rank (`train/…`, `agreement/…`).

        Raises:
            NotFinite: the gradient norm is infinite or not a number.
        """
        self._schedule.step(1)
        proximal: list[list[torch.Tensor] | None] = [None] * len(minibatches)
        if len(minibatches) > 1:
            proximal = [self.logprobs(minibatch) for minibatch in minibatches]
        statistics = Statistics()
        norms = [
            self._update(minibatch, at_start, statistics)
            for minibatch, at_start in zip(minibatches, proximal, strict=True)
        ]
        figures = statistics.reduced(counts_here=self._reports)
        figures["train/grad_norm"] = math.fsum(norms) / len(norms)
        figures["train/lr"] = self._optimizer.param_groups[0]["lr"]
        return figures

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities [sampled tokens] of each micro-batch under the present weights, without gradient."""

        def keep(output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return output[0].sum(), _count(0, output[0].device), output[0]

        return self._run(micro_batches, lambda index: keep, forward_only=True)

    def _update(
        self, micro_batches: Sequence[MicroBatch], proximal: list[torch.Tensor] | None, statistics: Statistics
    ) -> float:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self._optimizer.zero_grad()

        def loss_of(index: int) -> LossFunction:
            return partial(self._loss, micro_batches[index], proximal[index] if proximal else None, statistics)

        self._run(micro_batches, loss_of, forward_only=False)
        _, norm, _ = self._optimizer.step()
        if not math.isfinite(norm):
            raise NotFinite(
                f"the gradient norm is {norm}; the weights are spoilt. Lower training.optimizer.lr, or look at the "
                "samples of this step"
            )
        return norm

    def _loss(
        self, micro_batch: MicroBatch, proximal: torch.Tensor | None, statistics: Statistics, output: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        logprobs, entropy = output
        tokens = TokenBatch(
            policy_logprobs=logprobs,
            proximal_logprobs=logprobs.detach() if proximal is None else proximal,
            behavior_logprobs=micro_batch.behavior_logprobs,
            advantages=micro_batch.advantages,
        )
        terms = self._algorithm.loss(tokens)
        own = {"train/loss": terms.per_token, "train/entropy": entropy}
        statistics.add(dataclasses.replace(terms, means=terms.means | own), micro_batch)
        return terms.per_token.sum(), _count(micro_batch.sampled_tokens, logprobs.device), None

    def _run(
        self, micro_batches: Sequence[MicroBatch], loss_of: Callable[[int], LossFunction], forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns the loss function's third value for each."""

        def forward(iterator: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[Any, LossFunction]:
            index, micro_batch = next(iterator)
            output = model(
                micro_batch.tokens, None, None, labels=micro_batch.wanted, packed_seq_params=micro_batch.packed
            )
            return output, loss_of(index)

        iterators = [iter(list(enumerate(micro_batches))) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators,
            model=self.chunks,
            num_microbatches=len(micro_batches),
            # packs vary in length; the pipeline schedules ask for each one's shape (variable_seq_lengths)
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @property
    def _reports(self) -> bool:
        """One rank of each replica adds to the sums: the losses are known on the last pipeline stage, and each of
        its tensor-parallel ranks knows all of them."""
        return parallel_state.is_pipeline_last_stage() and self._grid.tensor_rank == 0


def _count(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int, device=device)
