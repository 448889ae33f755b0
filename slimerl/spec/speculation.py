"""Speculative generation: `rollout.speculation` (drafts of the rollout's own) and `engine.drafting` (the engine's).

Flows in: the sections' keys. Flows out: their specs, and what does not fit the rest of the run, as errors.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from slimerl.spec.algorithm import AlgorithmSpec
from slimerl.spec.fields import FilePath, Positive, Real, Strict

LENIENCE = {"ppo": 0.3, "dapo": 0.15}
"""Algorithm → natural logarithm of the published lenience, where it is not GRPO's (SPEC-RL)."""
GRPO_LENIENCE = 0.5


def _off_from_false(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class SpeculationSpec(Strict):
    """Drafts from siblings and the epoch before, scored in one pass of an engine instead of decoded token by token."""

    tier: Annotated[Literal["off", "exact", "lenient", "coupled"], BeforeValidator(_off_from_false)] = "off"
    """exact: every token has the policy's distribution (draft tokens are kept with their probability, a rejected one is
    drawn from the residual). coupled: seeds stay the same over the epochs, and a token is kept where the engine's keyed
    draw gives it again; the tokens are those without drafts. lenient: old tokens are kept by the ratio of their
    probabilities now and then (SPEC-RL), which is biased. Samples of the last two are not strictly on-policy: the
    policy was trained on their noise."""
    draft_tokens: Positive = 64
    """Of one draft at most."""
    drafts_per_request: Positive = 2
    """Drafts that are tried before the rest is decoded as ever; each costs a request to the engine, a rejected one of
    tier exact another."""
    siblings: bool | None = None
    """Drafts come from samples of the same group, too (default: true); which of them is ahead depends on the clock,
    and so do the tokens that tier exact draws. false: from earlier steps alone. Tier lenient takes a sample's own old
    answer."""
    max_running_requests: Positive = 64
    """Of an engine; while more are running nothing is drafted, since a full batch has no time to spare."""
    memory_tokens: Positive = 5_000_000
    """Answers that are remembered, about 20 bytes a token; the prompts answered longest ago are forgotten first."""
    log_lenience: Annotated[Real, Field(ge=0)] | None = None
    """Natural logarithm of the lenience; default: by algorithm, 0.5 (grpo), 0.3 (ppo), 0.15 (dapo)."""

    @model_validator(mode="after")
    def _what_is_read(self) -> "SpeculationSpec":
        if self.log_lenience is not None and self.tier != "lenient":
            raise ValueError(
                f"rollout.speculation.log_lenience is read by tier lenient alone, and tier is {self.tier}; drop one"
            )
        if self.tier == "lenient" and self.siblings is not None:
            raise ValueError(
                "rollout.speculation.siblings is not read by tier lenient, which takes a sample's own old answer; "
                "drop it"
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.tier != "off"

    @property
    def from_siblings(self) -> bool:
        return self.tier != "lenient" and self.siblings is not False

    def lenience(self, algorithm: str) -> float:
        """Natural logarithm."""
        return LENIENCE.get(algorithm, GRPO_LENIENCE) if self.log_lenience is None else self.log_lenience


class DraftingSpec(Strict):
    """An engine's own drafts (SGLang's speculative decoding), on GPUs."""

    method: Literal["mtp", "eagle", "eagle3"]
    """mtp: the model's own multi-token-prediction layer; eagle, eagle3: a draft model of its own."""
    model_path: FilePath | None = None
    """The draft model; of mtp the checkpoint's own layer."""
    frozen: bool = False
    """The draft keeps the weights that it starts with. No trainer trains a draft, so that there is no other: as the
    policy moves away, fewer drafts are accepted (`speculation/engine_accepted_fraction`); samples stay the policy's."""
    steps: Positive = 3
    """Tokens that the draft is ahead."""
    branches: Positive = 1
    """Most likely tokens that each step of a draft goes on with."""
    draft_tokens: Positive = 4
    """Tokens that the model verifies at once."""

    @model_validator(mode="after")
    def _fits_together(self) -> "DraftingSpec":
        if (self.model_path is None) != (self.method == "mtp"):
            needs = "is the model's own layer and takes no" if self.method == "mtp" else "needs its draft model in"
            raise ValueError(f"engine.drafting.method {self.method} {needs} engine.drafting.model_path")
        if self.draft_tokens > 1 + self.steps * self.branches * self.branches:
            raise ValueError(
                f"engine.drafting.draft_tokens = {self.draft_tokens} is more than {self.steps} steps of "
                f"{self.branches} branches give; lower it or raise engine.drafting.steps"
            )
        return self


def check_speculation(
    speculation: SpeculationSpec, temperature: float, algorithm: AlgorithmSpec, drafting: DraftingSpec | None
) -> None:
    """Raises ValueError for what does not go together."""
    if not speculation.is_on:
        return
    name = f"rollout.speculation.tier {speculation.tier}"
    if not algorithm.samples_responses:
        raise ValueError(f"{name}: {algorithm.name} takes its responses from the data; drop rollout.speculation")
    if temperature != 1.0:
        raise ValueError(
            f"{name} needs rollout.temperature 1.0, not {temperature:g}: engines score drafts at temperature 1 alone"
        )
    if speculation.tier == "lenient" and algorithm.proximal == "behavior":
        raise ValueError(
            f"{name} keeps tokens that the policy did not draw: algorithm.proximal must be trainer, which computes "
            "their log-probabilities anew"
        )
    if drafting is not None:
        raise ValueError(
            f"{name} and engine.drafting both draft; an engine that drafts by itself is given none of others: drop one"
        )
