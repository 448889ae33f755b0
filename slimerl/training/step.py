"""One training step: log-probabilities, loss, gradient, update, over Megatron's schedules.

Flows in: the micro-batches of this rank, grouped into minibatches. Flows out: changed weights and the step's figures.
Invariant: the gradient of a minibatch is that of (sum of the losses of its sampled tokens) / (number of sampled
tokens over all ranks), however it is split over micro-batches and ranks: each micro-batch's loss is a plain sum, the
data-parallel reduction adds, and Megatron's finalize_model_grads divides once by the all-reduced number of tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from slimerl.algorithms import Algorithm, TokenBatch
from slimerl.resilience import heartbeat
from slimerl.telemetry import trace
from slimerl.training.batches import MicroBatch, pack_nothing
from slimerl.training.context import whole_pack
from slimerl.training.parallel import Grid
from slimerl.training.reference import ReferenceModel
from slimerl.training.routing_replay import RoutingReplay
from slimerl.training.statistics import Statistics
from slimerl.training.stragglers import ComputeTimer
from slimerl.training.token_advantages import with_token_advantages

if TYPE_CHECKING:
    from slimerl.training.value_trainer import ValueTrainer

LossFunction = Callable[[Any], tuple[torch.Tensor, torch.Tensor, Any]]


class NotFinite(ArithmeticError):
    """The gradient is not a number; the weights must not be used any more."""


class PolicyTrainer:
    """Owns the model chunks, the optimizer and the schedule of this rank. Every method is called on every rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        schedule: Any,
        algorithm: Algorithm,
        grid: Grid,
        reference_refresh_steps: int = 0,
        routing: RoutingReplay | None = None,
        with_reference: bool = True,
        critic: "ValueTrainer | None" = None,
    ) -> None:
        """Where the algorithm needs a reference model, it is what the chunks hold now; where it needs a critic, that is
        given.

        Args:
            routing: of these chunks; None: nothing is replayed.
        """
        self.chunks = list(chunks)
        wanted = with_reference and algorithm.needs.reference
        self._reference = ReferenceModel(chunks, reference_refresh_steps) if wanted else None
        self._critic = critic
        self._name = "train"
        self._optimizer = optimizer
        self._schedule = schedule
        self._algorithm = algorithm
        self._grid = grid
        self.teacher: ReferenceModel | None = None
        """Where the algorithm asks for one."""
        self.compute_s = 0.0
        """Of this rank's own forward and backward passes in the last step."""
        self._routing = routing if routing is not None else RoutingReplay()
        self._timer = ComputeTimer(grid.device)
        config: Any = chunks[0].config  # whose functions the schedule calls
        config.finalize_model_grads_func = self._timer.before_exchange(config.finalize_model_grads_func)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = optimizer.scale_loss  # type: ignore[union-attr]
            chunk.train()

    def step(self, minibatches: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """One optimizer update per minibatch.

        What an algorithm needs of the start of the step comes first, with the weights there: log-probabilities of the
        reference model, values of the critic, advantages of the tokens, proximal log-probabilities. With one minibatch
        these equal the policy's own, and no pass is spent on them but where the advantages need them.

        Returns:
            Figures of the whole step, the same on every rank (`train/…`, `agreement/…`, `critic/…`).

        Raises:
            NotFinite: the gradient norm is infinite or not a number.
        """
        minibatches = self._with_logprobs(minibatches)
        if self._critic is not None:
            minibatches = self._critic.with_values(minibatches)
        self._schedule.step(1)
        self.compute_s = 0.0
        statistics = Statistics()
        minibatches = self._with_advantages(minibatches, statistics)
        figures: dict[str, float] = {}
        if self._is_trained():
            norms = [self._update(minibatch, statistics) for minibatch in minibatches]
            figures[f"{self._name}/grad_norm"] = math.fsum(norms) / len(norms)
        else:
            self._look(minibatches, statistics)
        figures |= statistics.reduced(counts_here=self._grid.speaks_for_replica)
        figures[f"{self._name}/lr"] = self._optimizer.param_groups[0]["lr"]
        return figures if self._critic is None else figures | self._critic.learn(minibatches)

    @torch.no_grad()
    def measure(self, minibatches: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """The figures of the loss under the present weights, as of `step`; nothing is trained."""
        statistics = Statistics()
        self._look(self._with_logprobs(minibatches), statistics)
        return statistics.reduced(counts_here=self._grid.speaks_for_replica)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities [sampled tokens] of each micro-batch under the present weights, without gradient.

        Known on the last pipeline stage; other ranks return nothing.
        """

        def keep(micro_batch: MicroBatch, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logprobs = self._whole(self._first_output(output), micro_batch)
            return logprobs.sum(), _count(0, logprobs.device), logprobs

        with trace.span("logprobs"):
            return self._run(micro_batches, lambda index: partial(keep, micro_batches[index]), forward_only=True)

    def _is_trained(self) -> bool:
        """In the present step; a critic may be taught first."""
        return self._algorithm.trains_policy(self._schedule.num_steps)

    def _first_output(self, output: Any) -> torch.Tensor:
        logprobs: torch.Tensor = output[0]
        return logprobs

    def _with_advantages(
        self, minibatches: Sequence[Sequence[MicroBatch]], statistics: Statistics
    ) -> Sequence[Sequence[MicroBatch]]:
        if not self._algorithm.needs.token_advantages:
            return minibatches
        return with_token_advantages(minibatches, self._algorithm, self._grid, statistics)

    def _with_logprobs(self, minibatches: Sequence[Sequence[MicroBatch]]) -> Sequence[Sequence[MicroBatch]]:
        """The micro-batches with the log-probabilities that are needed before the first update."""
        if len(minibatches) > 1 or self._algorithm.needs.proximal:
            minibatches = self._noted(minibatches, lambda each, found: replace(each, proximal_logprobs=found))
        if self._reference is not None:
            self._reference.refresh(self._schedule.num_steps)
            with trace.span("reference"), self._routing.paused(), self._reference.turn():
                minibatches = self._noted(minibatches, lambda each, found: replace(each, reference_logprobs=found))
        if self.teacher is not None:
            with trace.span("teacher"), self._routing.paused(), self.teacher.turn():
                minibatches = self._noted(minibatches, lambda each, found: replace(each, teacher_logprobs=found))
        return minibatches

    def _noted(
        self,
        minibatches: Sequence[Sequence[MicroBatch]],
        note: Callable[[MicroBatch, torch.Tensor], MicroBatch],
    ) -> Sequence[Sequence[MicroBatch]]:
        """The micro-batches with the log-probabilities under the weights in place, on the last stage."""
        found = [self.logprobs(minibatch) for minibatch in minibatches]
        if not self._grid.is_last_stage:
            return minibatches
        return [
            [note(each, logprobs) for each, logprobs in zip(minibatch, of_each, strict=True)]
            for minibatch, of_each in zip(minibatches, found, strict=True)
        ]

    @torch.no_grad()
    def _look(self, minibatches: Sequence[Sequence[MicroBatch]], statistics: Statistics) -> None:
        """Figures of the losses alone."""
        for minibatch in minibatches:
            self._pass(minibatch, statistics, forward_only=True)

    def _pass(self, micro_batches: Sequence[MicroBatch], statistics: Statistics, forward_only: bool) -> None:
        def loss_of(index: int) -> LossFunction:
            return partial(self._loss, micro_batches[index], statistics)

        self._run(micro_batches, loss_of, forward_only)
        if not self._grid.is_last_stage:
            self._name_figures(statistics)

    def _update(self, micro_batches: Sequence[MicroBatch], statistics: Statistics) -> float:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self._optimizer.zero_grad()
        self._timer.begin()
        with trace.span("forward and backward"):
            self._pass(micro_batches, statistics, forward_only=False)
        with trace.span("optimizer"):
            _, norm, _ = self._optimizer.step()
        self.compute_s += self._timer.seconds()
        if not math.isfinite(norm):
            raise NotFinite(
                f"the gradient norm is {norm}; the weights are spoilt. Lower training.optimizer.lr, or look at the "
                "samples of this step"
            )
        return norm

    def _loss(
        self, micro_batch: MicroBatch, statistics: Statistics, output: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        proximal = micro_batch.proximal_logprobs
        logprobs, entropy = (self._whole(each, micro_batch) for each in output)
        tokens = TokenBatch(
            policy_logprobs=logprobs,
            proximal_logprobs=logprobs.detach() if proximal is None else proximal,
            behavior_logprobs=micro_batch.behavior_logprobs,
            advantages=micro_batch.advantages,
            sequence=micro_batch.sequence,
            sequences=micro_batch.sequences,
            totals=micro_batch.totals,
            reference_logprobs=micro_batch.reference_logprobs,
            teacher_logprobs=micro_batch.teacher_logprobs,
            entropy=entropy,
        )
        terms = self._algorithm.loss(tokens)
        own = {"train/loss": terms.per_token, "train/entropy": entropy}
        if self._routing.of_engine:
            own["train/routing_unrecorded"] = micro_batch.routing.unrecorded
        statistics.add(replace(terms, means=terms.means | own), micro_batch)
        return terms.per_token.sum(), self._counted(micro_batch), None

    def _counted(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Every context-parallel rank knows all tokens; they are counted once."""
        counted = micro_batch.sampled_tokens if self._grid.place.context == 0 else 0
        return _count(counted, micro_batch.advantages.device)

    def _whole(self, own: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """[sampled tokens of the pack] from those of this context-parallel rank."""
        if micro_batch.places is None:
            return own
        return whole_pack(own, micro_batch.places, micro_batch.sampled_tokens, self._grid.context)

    def _name_figures(self, statistics: Statistics) -> None:
        """Where no loss is known, the figures of no tokens: all ranks must add up the same names."""
        nothing = pack_nothing(self._grid.device)
        self._loss(nothing, statistics, (nothing.advantages, nothing.advantages))

    def _run(
        self, micro_batches: Sequence[MicroBatch], loss_of: Callable[[int], LossFunction], forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns the loss function's third value for each."""

        def forward(iterator: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[Any, LossFunction]:
            heartbeat.beat()
            index, micro_batch = next(iterator)
            with self._routing.forward(model, micro_batch.routing):
                output = model(
                    micro_batch.tokens, None, None, labels=micro_batch.wanted, packed_seq_params=micro_batch.packed
                )
            return output, loss_of(index)

        iterators = [iter(list(enumerate(micro_batches))) for _ in self.chunks]
        with self._routing.schedule():
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


def _count(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int, device=device)
