"""The source of pairs, for dpo and reward models: rows of preference data (`preference_rows.py`), epoch after epoch.

Flows in: pairs. Flows out: this rank's micro-batches. Invariant: a pair is never split; the chosen answer comes first.
"""

from collections.abc import Sequence

from slimerl.training.batches import MicroBatch
from slimerl.training.packing import SampleShape
from slimerl.training.preference_rows import Pair
from slimerl.training.sft_data import RowSource
from slimerl.training.step import PolicyTrainer

FIGURES = {
    "train/loss": "eval/loss",
    "preference/accuracy": "eval/accuracy",
    "preference/margin": "eval/margin",
}
"""Of a loss over the held-out pairs → the name that they have there."""


class PairSource(RowSource[Pair]):
    def evaluate(self, step: int, trainer: PolicyTrainer) -> dict[str, float]:
        """Mean loss of the held-out pairs, the share in which the chosen answer leads, and by how much."""
        figures = trainer.measure(self._packed(self._held_out, minibatches=1))
        return {name: figures[of] for of, name in FIGURES.items()} | {"eval/pairs": float(len(self._held_out))}

    def _packed(self, rows: Sequence[Pair], minibatches: int) -> list[list[MicroBatch]]:
        samples = [each for row in rows for each in (row.chosen, row.rejected)]
        shapes = [
            SampleShape(
                *(sample.prompt_length, len(sample.sampled), number // 2, int(sample.sampled.sum())),
                prefix=sample.tokens[: sample.prompt_length].tobytes(),
            )
            for number, sample in enumerate(samples)
        ]
        plan = self._batching.plan(shapes, minibatches)
        return self._batching.packs(plan, samples, self._grid.place.data)
