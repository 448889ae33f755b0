"""Where the samples of a step come from: the one thing in which the loop differs between algorithms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slimerl.training.batches import MicroBatch
from slimerl.training.clock import StepClock
from slimerl.training.step import PolicyTrainer


@dataclass(frozen=True)
class StepInput:
    """This rank's micro-batches, per minibatch, and what is to be reported of them."""

    minibatches: Sequence[Sequence[MicroBatch]]
    figures: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """Every method is called on every rank, in the same order."""

    def take(self, step: int, clock: StepClock) -> StepInput | None:
        """The samples of `step` (from 1); None: engines want the present weights first, and then it is asked again."""
        ...

    def trained(self, step: int) -> None:
        """The samples of `step` have been used."""
        ...

    def begin_evaluation(self, step: int) -> None:
        """Let the engines evaluate the weights of `step`; `evaluate` of the same step has the figures."""
        ...

    def evaluation_ended(self, step: int) -> bool:
        """Of one that was begun: does `evaluate` have its figures, or that there are none, without waiting?"""
        ...

    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float] | None:
        """Figures of the held-out data (`eval/…`) on the first rank; None: as of `take`."""
        ...

    def state(self) -> bytes:
        """What it has to know to go on after the present step; on the first rank, elsewhere nothing."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from `state`, which is that of the first rank; called before the first step."""
        ...
