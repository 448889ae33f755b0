"""Engines that come and go by load: their bounds, and what these may be beside the other sections.

Flows in: `engine.elastic`, the run's spec. Flows out: values, or a refusal that names what to set.
Invariant: what passes can change the number of engines at some step.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from slimerl.spec.fields import Positive, Real, Strict

if TYPE_CHECKING:
    from slimerl.spec.schema import RunSpec

Share = Annotated[Real, Field(gt=0, lt=1)]


class ElasticSpec(Strict):
    """Engines come and go by load, one at a time: one more where the trainer waits for samples, one fewer where engines
    have nothing to do and would not be missed. `slimerl run` does it; engines need a place beside the trainer's."""

    min: Positive = 1
    max: Positive
    """On GPUs so many engines must have room, whether they run or not."""
    trainer_idle: Share = 0.25
    """An engine is added where the trainer waits for so much of a step, or more, and engines have work meanwhile. With
    one fewer it must be foreseen to wait for less than half of this."""
    engines_idle: Share = 0.3
    """An engine is removed where engines are without a request for so much of their time, or more."""
    cooldown_steps: Positive = 5
    """Whole steps in which the present engines served, of which the median counts, before one is added or removed. A
    number of engines that was too few is tried again after at least four times as many, then eight, and so on."""

    @model_validator(mode="after")
    def _can_change(self) -> "ElasticSpec":
        if self.min >= self.max:
            raise ValueError(
                f"engine.elastic.min = {self.min} and engine.elastic.max = {self.max} leave nothing to change; raise "
                "max, or drop engine.elastic"
            )
        return self

    @property
    def shortest_run(self) -> int:
        """Steps in which something may just change: the first is warm-up, then some are looked at, and an engine that
        is added pays after as many."""
        return 1 + 2 * self.cooldown_steps


def check_elastic(spec: "RunSpec") -> None:
    """Raises ValueError: engines could not come and go, or never would."""
    elastic, replicas = spec.engine.elastic, spec.engine.replicas
    if elastic is None:
        return
    if not spec.uses_engines:
        raise ValueError(
            f"engine.elastic: {spec.algorithm.name} reads its responses from the data and has no engines; drop it"
        )
    if spec.shares_gpus:
        raise ValueError(
            "engine.elastic needs engines beside the trainer; those of cluster.placement: colocated have its GPUs, in "
            "turns. Set cluster.placement: disaggregated, or drop engine.elastic"
        )
    if not elastic.min <= replicas <= elastic.max:
        raise ValueError(
            f"the run begins with engine.replicas = {replicas}, which is not within engine.elastic.min = {elastic.min} "
            f"and engine.elastic.max = {elastic.max}; change one of them"
        )
    if spec.training.steps < elastic.shortest_run:
        raise ValueError(
            f"engine.elastic.cooldown_steps = {elastic.cooldown_steps}: in training.steps = {spec.training.steps} "
            f"nothing would change, it takes {elastic.shortest_run}; lower the one, raise the other, or drop "
            "engine.elastic"
        )
