"""Sources of tokenised rows, epoch after epoch; of those of supervised fine-tuning (`sft_rows.py`).

Flows in: samples. Flows out: this rank's micro-batches. Invariant: the order is a pure function of the seed, the epoch
and the ids.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
import xxhash

from slimerl.spec import RunSpec
from slimerl.training.batches import MicroBatch
from slimerl.training.batching import Batching
from slimerl.training.clock import StepClock
from slimerl.training.packing import SampleShape
from slimerl.training.parallel import Grid, sum_and_max
from slimerl.training.source import StepInput
from slimerl.training.step import PolicyTrainer
from slimerl.training.training_sample import TrainingSample


class _Row(Protocol):
    @property
    def sample_id(self) -> str: ...


RowKind = TypeVar("RowKind", bound=_Row)


class RowSource(Generic[RowKind]):
    """Epoch after epoch of all rows, each epoch in an order of its own; a step may span two epochs."""

    def __init__(
        self,
        spec: RunSpec,
        grid: Grid,
        batching: Batching,
        train: Sequence[RowKind],
        held_out: Sequence[RowKind] = (),
    ) -> None:
        self._spec, self._grid, self._batching, self._train = spec, grid, batching, train
        self._held_out = held_out[: spec.evaluation.max_prompts]
        self._epoch = -1
        self._places: list[int] = []

    def take(self, step: int, clock: StepClock) -> StepInput:
        with clock(step, "fetch"):
            size = self._spec.training.prompts_per_step
            chosen = [self._at(position) for position in range((step - 1) * size, step * size)]
            return StepInput(self._packed(chosen, self._spec.training.minibatches_per_step))

    def trained(self, step: int) -> None: ...

    def state(self) -> bytes:
        """Nothing: the rows of a step follow from its number."""
        return b""

    def restore(self, state: bytes) -> None: ...

    def begin_evaluation(self, step: int) -> None:
        """The trainer evaluates by itself, when it is asked to; the spec refuses evaluation.background here."""

    def evaluation_ended(self, step: int) -> bool:
        return True

    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float]:
        raise NotImplementedError

    def _packed(self, rows: Sequence[RowKind], minibatches: int) -> list[list[MicroBatch]]:
        raise NotImplementedError

    def _at(self, position: int) -> RowKind:
        epoch, place = divmod(position, len(self._train))
        if epoch != self._epoch:
            keys = [f"{self._spec.seed}/{epoch}/{sample.sample_id}".encode() for sample in self._train]
            self._places = sorted(range(len(keys)), key=lambda each: xxhash.xxh64_intdigest(keys[each]))
            self._epoch = epoch
        return self._train[self._places[place]]


class SampleSource(RowSource[TrainingSample]):
    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float]:
        """Mean negative log-likelihood per response token of the held-out rows, in nats."""
        [micro_batches] = self._packed(self._held_out, minibatches=1)
        found = torch.cat([torch.zeros(0, device=self._grid.device), *trainer.logprobs(micro_batches)]).double()
        sums = torch.stack([-found.sum(), found.new_tensor(len(found))])
        (total, count), _ = sum_and_max(sums, found.new_zeros(0), counts_here=self._grid.speaks_for_replica)
        return {"eval/loss": total / max(1.0, count)}

    def _packed(self, rows: Sequence[TrainingSample], minibatches: int) -> list[list[MicroBatch]]:
        shapes = [
            SampleShape(sample.prompt_length, len(sample.sampled), sample.sample_id, int(sample.sampled.sum()))
            for sample in rows
        ]
        plan = self._batching.plan(shapes, minibatches)
        return self._batching.packs(plan, rows, self._grid.place.data)
