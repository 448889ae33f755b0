"""The `algorithm` section: which algorithm, and its options.

Flows in: the section's keys. Flows out: an `AlgorithmSpec`.
Invariant: an option is accepted only where the named algorithm (with its other options) reads it; what is not read is
refused when given and left out when the spec is written. A default stands at its field, the few that differ by
algorithm in `ALGORITHM_OPTIONS`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from slimerl.spec.fields import FilePath, NonNegative, Positive, Real, Strict
from slimerl.spec.functions import ImportPath

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "decoupled_ppo",
    "distillation",
    "custom",
    "sft",
    "dpo",
    "reward_model",
]
Correction = Literal["none", "token_tis", "sequence_tis", "mis", "icepop", "geometric_rejection"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]
RoutingReplay = Literal["none", "r2", "r3"]

_CLIP = dict.fromkeys(("clip_low", "clip_high"))
_CORRECTION = dict.fromkeys(("correction", "proximal", "routing_replay"))
_KL_LOSS = dict.fromkeys(("kl_coef", "kl_estimator", "reference_refresh_steps"))
_REWARD_KL = _KL_LOSS | {"kl_in": None}
_COMMON = _CORRECTION | dict.fromkeys(("entropy_coef", "aggregation"))
_STD = {"normalize_by_std": None}

ALGORITHM_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _CLIP | _STD | _COMMON | _KL_LOSS,
    "dr_grpo": _CLIP | _COMMON | _KL_LOSS | {"aggregation": "constant_length"},
    "dapo": _CLIP
    | _STD
    | _CORRECTION
    | dict.fromkeys(("entropy_coef", "overlong_limit_tokens", "overlong_buffer_tokens"))
    | {"dynamic_sampling_rounds": 10},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"}
    | _STD
    | _CORRECTION
    | _KL_LOSS
    | {"entropy_coef": None},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0} | _STD | _COMMON | _KL_LOSS,
    "rloo": _CLIP | _COMMON | _KL_LOSS,
    "reinforce_pp": _CLIP | _COMMON | _REWARD_KL | {"gamma": None},
    "reinforce_pp_baseline": _CLIP | _COMMON | _REWARD_KL | {"gamma": None},
    "ppo": _CLIP
    | _COMMON
    | _REWARD_KL
    | dict.fromkeys(("gamma", "gae_lambda", "value_clip", "value_warmup_steps"))
    | {"clip_high": 0.2},
    "decoupled_ppo": _CLIP
    | _STD
    | _KL_LOSS
    | dict.fromkeys(("behavior_weight_cap", "entropy_coef", "aggregation", "routing_replay"))
    | {"clip_high": 0.2},
    "distillation": _CLIP | _COMMON | {"teacher_path": None},
    "custom": _CLIP | _STD | _COMMON | _KL_LOSS | dict.fromkeys(("advantage_function", "loss_function")),
    "sft": {},
    "dpo": {"dpo_beta": None},
    "reward_model": {},
}
"""Algorithm → the options that it reads; a value is this algorithm's default, None the field's own."""

FIXED_AGGREGATION: Mapping[str, Aggregation] = {"dr_grpo": "constant_length", "gspo": "sequence_mean"}
"""Where the aggregation is part of the algorithm's definition."""

CORRECTION_OPTIONS: Mapping[str, Mapping[str, float | None]] = {
    "none": {},
    "token_tis": {"correction_cap": None},
    "sequence_tis": {"correction_cap": None},
    "mis": {"correction_low": 0.5, "correction_high": 2.0},
    "icepop": {"correction_low": 0.5, "correction_high": 5.0},
    "geometric_rejection": {"geometric_tolerance": None},
}
"""Correction → the options that it reads, as above."""

COMPARES_GROUPS = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp_baseline"}) | {
    "decoupled_ppo"
}
"""Algorithms whose advantage of a sample alone is zero."""

FROM_DATA = frozenset({"sft", "dpo", "reward_model"})
"""Algorithms that read their responses from the data instead of sampling them."""


def options_read(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that an algorithm with these options reads, with the defaults that differ from the field's (or None).

    Args:
        given: keys of the section; a missing or unknown `name` counts as the default or as one that reads nothing.
    """
    name = given.get("name", AlgorithmSpec.model_fields["name"].default)
    read: dict[str, Any] = {"name": None, **ALGORITHM_OPTIONS.get(name, {})}
    if "correction" in read:
        correction = given.get("correction", "none")
        read |= CORRECTION_OPTIONS.get(correction, {}) if isinstance(correction, str) else {}
    if "kl_in" in read and given.get("kl_in") == "reward":
        read["kl_estimator"] = "k1"
    if "aggregation" in read and given.get("aggregation", read["aggregation"]) == "constant_length":
        read["loss_length_tokens"] = None
    if name == "custom" and given.get("loss_function") is not None:
        del read["clip_low"], read["clip_high"]
    if name == "custom" and given.get("advantage_function") is not None:
        del read["normalize_by_std"]
    return read


class AlgorithmSpec(Strict):
    """What turns rewards into a gradient. Formulas and sources: `slimerl/algorithms/table.py`."""

    name: AlgorithmName = "grpo"
    clip_low: Annotated[Real, Field(gt=0, le=1)] = 0.2
    """The policy ratio is clipped below 1 - clip_low; 1 is no lower bound."""
    clip_high: Annotated[Real, Field(gt=0)] = 0.28
    """The policy ratio is clipped above 1 + clip_high."""
    normalize_by_std: bool = True
    """Divide the group-centred reward by the group's standard deviation."""
    aggregation: Aggregation = "token_mean"
    """Mean over the tokens of the global minibatch, over its samples of each one's token mean, or over its samples of
    each one's token sum divided by `loss_length_tokens`."""
    loss_length_tokens: Positive | None = None
    """The constant of `constant_length`; usually rollout.max_new_tokens."""

    correction: Correction = "none"
    """Train-inference correction: detached weights from the ratio proximal / behaviour."""
    correction_cap: Annotated[Real, Field(gt=0)] = 2.0
    """Upper bound of the weight (token_tis, sequence_tis)."""
    correction_low: Annotated[Real, Field(ge=0, lt=1)] = 0.5
    correction_high: Annotated[Real, Field(gt=1)] = 2.0
    """Tokens whose weight is outside [correction_low, correction_high] are masked (mis, icepop)."""
    geometric_tolerance: Annotated[Real, Field(gt=0)] = 1e-3
    """Samples whose mean log-ratio in nats is outside ± this are masked (geometric_rejection)."""
    behavior_weight_cap: Annotated[Real, Field(gt=0)] | None = None
    """Tokens whose weight proximal / behaviour is above are masked (decoupled_ppo); default: none."""
    proximal: Literal["trainer", "behavior"] = "trainer"
    """What the policy ratio is taken against: the trainer's own log-probabilities at the start of the step, or the
    engine's (which leaves nothing to be corrected)."""

    routing_replay: RoutingReplay = "none"
    """Experts that tokens go to in the policy's passes, of a model that has experts. none: those that the router
    chooses each time. r2: those of the first pass of the step. r3: those that the engine chose while it sampled, for
    tokens of which it reports them. Their weights are always the router's, so that it is trained."""

    kl_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference model; 0 needs no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KlEstimator = "k3+"
    """In the reward the default is k1."""
    reference_refresh_steps: NonNegative = 0
    """After so many steps the reference model becomes what the policy is then; 0: it stays the model of the start. A
    run that is asked to stop does so at the next of these steps: between them no checkpoint has its reference model."""
    entropy_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""

    gamma: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[Real, Field(ge=0, le=1)] = 1.0
    value_clip: Annotated[Real, Field(gt=0)] = 0.2
    """How far a value may move from the old one before the larger of both losses counts."""
    value_warmup_steps: NonNegative = 0
    """Steps at the start in which the critic alone is trained."""

    overlong_limit_tokens: Positive | None = None
    """Response length at which the penalty is -1; usually rollout.max_new_tokens. Default: no penalty."""
    overlong_buffer_tokens: Positive | None = None
    """The penalty begins this many tokens before the limit."""
    dynamic_sampling_rounds: NonNegative = 0
    """Groups that are all right or all wrong are replaced, until this many times the step's groups were sampled; 0:
    they are kept."""

    teacher_path: FilePath | None = None
    """Of the model that on-policy distillation learns from: a checkpoint of the policy's architecture, whose weights
    each rank keeps in host memory."""
    dpo_beta: Annotated[Real, Field(gt=0)] = 0.1
    advantage_function: ImportPath | None = None
    """`package.module:function`, (rewards, groups) → one advantage per sample."""
    loss_function: ImportPath | None = None
    """`package.module:function`, (tokens: TokenBatch) → the loss of each token."""

    @property
    def samples_responses(self) -> bool:
        return self.name not in FROM_DATA

    @property
    def compares_groups(self) -> bool:
        return self.name in COMPARES_GROUPS or (self.name == "custom" and self.advantage_function is None)

    @property
    def has_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def trains_on_pairs(self) -> bool:
        return self.name in ("dpo", "reward_model")

    @property
    def has_reference_model(self) -> bool:
        return self.kl_coef > 0 or self.name == "dpo"

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("name", "grpo") not in get_args(AlgorithmName):
            return given  # the fields' own checks say what is wrong
        read = options_read(given)
        for key in given:
            if key in cls.model_fields and key not in read:
                raise ValueError(_unread(key, given, read))
        fixed = FIXED_AGGREGATION.get(given.get("name", ""))
        if fixed and given.get("aggregation", fixed) != fixed:
            raise ValueError(f"algorithm.aggregation of {given['name']} is {fixed} by definition; leave the key out")
        return {key: default for key, default in read.items() if default is not None} | given

    @model_validator(mode="after")
    def _fits_together(self) -> "AlgorithmSpec":
        if self.proximal == "behavior" and self.correction != "none":
            raise ValueError(
                f"algorithm.correction: {self.correction} would count the ratio twice where algorithm.proximal is "
                "behavior: the policy ratio is already taken against the engine's log-probabilities; drop one of both"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError("algorithm.kl_estimator k1 has no expected gradient in the loss; use k3+ or k2")
        if self.kl_in == "reward" and self.kl_estimator == "k3+":
            raise ValueError(
                "algorithm.kl_estimator k3+ tells value and gradient apart, a reward has no gradient; use k1"
            )
        if self.reference_refresh_steps and not self.kl_coef:
            raise ValueError("algorithm.reference_refresh_steps: there is no reference model with algorithm.kl_coef 0")
        if self.aggregation == "constant_length" and self.loss_length_tokens is None:
            raise ValueError(
                "algorithm.loss_length_tokens is missing: aggregation constant_length divides by it; "
                "rollout.max_new_tokens is usual"
            )
        if (self.overlong_limit_tokens is None) != (self.overlong_buffer_tokens is None):
            raise ValueError("algorithm.overlong_limit_tokens and algorithm.overlong_buffer_tokens need each other")
        if self.overlong_limit_tokens and (self.overlong_buffer_tokens or 0) > self.overlong_limit_tokens:
            raise ValueError("algorithm.overlong_buffer_tokens must not exceed algorithm.overlong_limit_tokens")
        if self.name == "custom" and self.advantage_function is None and self.loss_function is None:
            raise ValueError("algorithm custom needs algorithm.advantage_function, algorithm.loss_function or both")
        return self

    @model_serializer(mode="wrap")
    def _what_is_read(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        read = options_read(values)
        return {key: value for key, value in values.items() if key in read}


def _unread(key: str, given: Mapping[str, Any], read: Mapping[str, Any]) -> str:
    """Why an option is refused, and what to do."""
    name = given.get("name", "grpo")
    corrections = [correction for correction, options in CORRECTION_OPTIONS.items() if key in options]
    if corrections and "correction" in read:
        return (
            f"algorithm.{key} is not read with correction {given.get('correction', 'none')}; it belongs to "
            f"{' and '.join(corrections)}: set algorithm.correction or drop the key"
        )
    if corrections:
        return f"algorithm.{key} is not read by {name}, which takes no correction; drop it"
    if key == "loss_length_tokens" and "aggregation" in read:
        return "algorithm.loss_length_tokens is read with aggregation constant_length alone; set that or drop the key"
    others = [other for other, options in ALGORITHM_OPTIONS.items() if key in options]
    return (
        f"algorithm.{key} is not read by {name}{' with these options' if key in ALGORITHM_OPTIONS[name] else ''}; drop "
        f"it, or choose one of {', '.join(others)}"
    )
