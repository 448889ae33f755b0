"""What algorithms share that read their answers from data: nothing is sampled, nothing is estimated."""

from collections.abc import Sequence

from slimerl.algorithms.terms import (
    LossTerms,
    MissingInput,
    Needs,
    Scores,
    StepTokens,
    TokenAdvantages,
    TokenBatch,
    ValueBatch,
)
from slimerl.spec.algorithm import AlgorithmSpec


class FromData:
    """Subclasses say `loss` or `value_loss`."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    @property
    def needs(self) -> Needs:
        return Needs()

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        """Every given answer counts the same."""
        return [1.0] * len(rewards), {}

    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None
    ) -> Scores:
        return self.outcomes(rewards, groups, lengths)

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        return TokenAdvantages(step.outcomes[step.sequence])

    def loss(self, tokens: TokenBatch) -> LossTerms:
        raise MissingInput(f"{self.spec.name} trains no policy: it has a value loss alone")

    def value_loss(self, tokens: ValueBatch) -> LossTerms:
        raise MissingInput(f"{self.spec.name} trains a policy alone: there is no value loss")

    def trains_policy(self, step: int) -> bool:
        return not self.needs.scores
