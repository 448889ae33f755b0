"""What is evaluated, how often, and how held-out prompts are sampled.

Flows in: the `evaluation` section. Flows out: `EvaluationSpec`; `check_evaluation` refuses what other sections forbid.
Invariant: every statistic that is asked for has the samples that it needs.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from slimerl.spec.fields import FilePath, NonNegative, Positive, Real, Strict, tuple_from_list
from slimerl.spec.reward import AnyReward, CompositeReward, FunctionReward, MathReward

Counts = Annotated[tuple[Positive, ...], BeforeValidator(tuple_from_list)]
Temperature = Annotated[Real, Field(ge=0)]


class EvaluationSetSpec(Strict):
    """Prompts of a file of their own, sampled in their own way; figures are `eval/NAME/…`. What is not set here is as
    in `evaluation`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    path: FilePath
    """As `data.eval_path`."""
    samples_per_prompt: Positive = 1
    pass_at: Counts = (1,)
    """Each k: the chance that one of k answers is right."""
    majority_at: Counts = ()
    """Each k: the chance that the answer most of k give is right."""
    max_prompts: Positive | None = None
    max_new_tokens: Positive | None = None
    temperature: Temperature | None = None

    @model_validator(mode="after")
    def _samples_suffice(self) -> "EvaluationSetSpec":
        for key in ("pass_at", "majority_at"):
            if max(getattr(self, key), default=0) > self.samples_per_prompt:
                raise ValueError(
                    f"{key} = {list(getattr(self, key))} of set '{self.name}' asks for more answers than "
                    f"samples_per_prompt = {self.samples_per_prompt}; raise that, or lower {key}"
                )
        return self


class EvaluationSpec(Strict):
    every_steps: NonNegative = 0
    """0: only before the first and after the last step."""
    max_prompts: Positive = 256
    """Of each file, from its beginning."""
    max_new_tokens: Positive | None = None
    """Default: rollout.max_new_tokens."""
    temperature: Temperature = 0.0
    sets: Annotated[tuple[EvaluationSetSpec, ...], BeforeValidator(tuple_from_list)] = ()
    """Beside `data.eval_path`, of which one answer to each prompt is taken."""
    background: bool = False
    """Engines evaluate while the trainer is at the next step; new weights wait for the end of it, so that one version
    answers all prompts. Before the first and after the last step there is nothing else to do."""
    engines: NonNegative = 0
    """The last so many of `engine.replicas` evaluate and do nothing else (`background`). New weights do not wait for
    them: they keep theirs while they evaluate, and take part only in the syncs of versions that are evaluated."""

    @model_validator(mode="after")
    def _sets_fit(self) -> "EvaluationSpec":
        names = [one.name for one in self.sets]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two sets of evaluation.sets are called '{double}'; their figures would be mixed up")
        for one in self.sets:
            if one.samples_per_prompt > 1 and self.temperature_of(one) == 0:
                raise ValueError(
                    f"all {one.samples_per_prompt} answers of set '{one.name}' to a prompt would be the same: its "
                    "temperature is 0; set one above, or samples_per_prompt to 1"
                )
        return self

    def is_due(self, step: int, steps: int) -> bool:
        """Are the weights after this step, of so many, evaluated?"""
        return step in (0, steps) or (self.every_steps > 0 and step % self.every_steps == 0)

    def temperature_of(self, one: EvaluationSetSpec) -> float:
        return self.temperature if one.temperature is None else one.temperature

    def new_tokens_of(self, one: EvaluationSetSpec | None, rollout_tokens: int) -> int:
        """Of a set, or of `data.eval_path`; `rollout_tokens`: rollout.max_new_tokens."""
        own = one.max_new_tokens if one is not None else None
        return own or self.max_new_tokens or rollout_tokens

    def longest_new_tokens(self, rollout_tokens: int) -> int:
        """Of rollout and evaluation together."""
        return max(rollout_tokens, *(self.new_tokens_of(one, rollout_tokens) for one in (None, *self.sets)))


def check_evaluation(
    evaluation: EvaluationSpec, reward: AnyReward, uses_engines: bool, shares_gpus: bool, has_rows: bool
) -> None:
    """Raises ValueError naming what to set."""
    if evaluation.every_steps and not has_rows:
        raise ValueError(
            "evaluation.every_steps needs held-out rows: set data.eval_path or evaluation.sets, or leave it out"
        )
    if evaluation.sets and not uses_engines:
        raise ValueError(
            "evaluation.sets are answered by engines, and this algorithm has none; name one file in data.eval_path"
        )
    if any(one.majority_at for one in evaluation.sets) and not _tells_answers(reward):
        raise ValueError(
            "evaluation.sets with majority_at need to know which answers are the same, and this reward does not tell: "
            "use reward.kind math, or a function that sets Scored.said"
        )
    if not evaluation.background:
        return
    if not has_rows:
        raise ValueError("evaluation.background: there is nothing to evaluate; set data.eval_path or evaluation.sets")
    if not uses_engines or shares_gpus:
        raise ValueError(
            "evaluation.background needs engines that serve while the trainer trains; set cluster.placement: "
            "disaggregated, or drop it"
        )
    if not evaluation.every_steps:
        raise ValueError(
            "evaluation.background: before the first and after the last step the trainer has nothing else to do, and "
            "evaluation.every_steps = 0 evaluates at no other; set that, or drop it"
        )


def _tells_answers(reward: AnyReward) -> bool:
    """A function may; an evaluation in which it does not ends with an error that says so."""
    if isinstance(reward, CompositeReward):
        return _tells_answers(reward.parts[0].reward)
    return isinstance(reward, MathReward | FunctionReward)
