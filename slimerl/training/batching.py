"""How a run cuts its steps: which samples form a micro-batch, and how that is laid out for this rank.

Flows in: the spec, this rank's grid, the model. Flows out: `Batching`. Invariant: `plan` is the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slimerl.algorithms import Needs
from slimerl.spec import RunSpec
from slimerl.training.batches import MicroBatch, PackForm, pack
from slimerl.training.capabilities import Capabilities
from slimerl.training.cost import pair_cost
from slimerl.training.model_config import ModelArguments
from slimerl.training.packing import PackingRules, SampleShape, StepPlan, plan_step
from slimerl.training.parallel import Grid
from slimerl.training.routing_record import RoutedShape
from slimerl.training.segments import Stripes
from slimerl.training.training_sample import TrainingSample


@dataclass(frozen=True)
class Batching:
    """`temperature`: of sampling; log-probabilities are of the tempered distribution."""

    rules: PackingRules
    form: PackForm
    temperature: float = 1.0

    def plan(self, shapes: Sequence[SampleShape], minibatches: int) -> StepPlan:
        return plan_step(shapes, self.rules, minibatches)

    def packs(
        self, plan: StepPlan, samples: Mapping[int, TrainingSample] | Sequence[TrainingSample], data_rank: int
    ) -> list[list[MicroBatch]]:
        """The micro-batches of one data-parallel rank, per minibatch; `samples`: its own, by number in the step."""
        return [
            [
                pack([samples[index] for index in part], self.temperature, self.form, minibatch.totals)
                for part in minibatch.ranks[data_rank]
            ]
            for minibatch in plan.minibatches
        ]


def build_batching(
    spec: RunSpec, grid: Grid, capabilities: Capabilities, arguments: ModelArguments, needs: Needs
) -> Batching:
    training = spec.training
    shared_prefix = training.shared_prefix != "never" and capabilities.segmented
    rules = PackingRules(
        ranks=training.parallel.data,
        micro_batch_tokens=training.micro_batch_tokens,
        shared_prefix=shared_prefix,
        pair_cost=pair_cost(arguments.transformer),
        # Megatron's interleaved schedule takes micro-batches in rounds of one for each stage
        multiple=training.parallel.pipeline if training.parallel.virtual > 1 else 1,
        pairs=needs.pairs,
    )
    form = PackForm(
        tensor=training.parallel.tensor,
        stripes=Stripes(grid.place.context, training.parallel.context),
        shared_prefix=shared_prefix,
        segmented=capabilities.segmented,
        device=grid.device,
        routed=routed_shape(arguments) if spec.algorithm.routing_replay == "r3" else None,
        scores=needs.scores,
    )
    return Batching(rules, form, spec.rollout.temperature if spec.uses_engines else 1.0)


def routed_shape(arguments: ModelArguments) -> RoutedShape:
    """Of a model with experts."""
    model = arguments.transformer
    return RoutedShape(model["num_layers"], model["moe_router_topk"], arguments.experts, arguments.sparse_layers)
