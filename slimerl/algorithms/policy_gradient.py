"""What all policy-gradient algorithms have in common; each fills in its outcomes and its surrogate.

loss = aggregate( w ⊙ surrogate + kl_coef · KL - entropy_coef · H ), w the detached train-inference correction.

Flows in: a `TokenBatch`. Flows out: `LossTerms`. Invariant: what is masked contributes nothing and is still counted.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimerl.algorithms.aggregation import token_weights
from slimerl.algorithms.corrections import CORRECTIONS, Weights, importance
from slimerl.algorithms.kl import KL_ESTIMATORS, k3
from slimerl.algorithms.policy_loss import clipped_policy_loss
from slimerl.algorithms.terms import (
    LossTerms,
    MissingInput,
    Needs,
    Scores,
    StepTokens,
    TokenAdvantages,
    TokenBatch,
    ValueBatch,
    required,
)
from slimerl.spec.algorithm import AlgorithmSpec


class PolicyGradient:
    """One advantage per sample, PPO's clipped surrogate. Subclasses say `outcomes`, and what else differs."""

    def __init__(self, spec: AlgorithmSpec) -> None:
        self.spec = spec

    @property
    def needs(self) -> Needs:
        spec = self.spec
        correction = CORRECTIONS.get(spec.correction)
        return Needs(
            sequences=spec.aggregation != "token_mean" or (correction is not None and correction.by_sequence),
            proximal=spec.kl_coef > 0 and spec.kl_in == "reward",
            reference=spec.kl_coef > 0,
            entropy_gradient=spec.entropy_coef > 0,
        )

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        raise NotImplementedError

    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None
    ) -> Scores:
        if self.needs.token_advantages:
            raise MissingInput(
                f"the advantages of {self.spec.name} differ from token to token: call outcomes and token_advantages"
            )
        return self.outcomes(rewards, groups, lengths)

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """The sample's advantage at each of its tokens."""
        return TokenAdvantages(step.outcomes[step.sequence])

    def surrogate(self, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token, and 1.0 where its gradient is cut off by a clip, else 0.0. Both [tokens]."""
        return clipped_policy_loss(
            tokens.policy_logprobs,
            tokens.proximal_logprobs,
            tokens.advantages,
            self.spec.clip_low,
            self.spec.clip_high,
        )

    def correction(self, tokens: TokenBatch) -> Weights | None:
        entry = CORRECTIONS.get(self.spec.correction)
        return entry.weights(tokens, self.spec) if entry is not None else None

    def loss(self, tokens: TokenBatch) -> LossTerms:
        against = tokens.behavior_logprobs if self.spec.proximal == "behavior" else tokens.proximal_logprobs
        per_token, clipped = self.surrogate(replace(tokens, proximal_logprobs=against.detach()))
        delta = (tokens.proximal_logprobs.detach() - tokens.behavior_logprobs).abs()
        means = {
            "train/clip_fraction": clipped,
            # x ~ behaviour here, so the engine's policy stands in the place of the sampling one
            "train/approx_kl": k3(tokens.behavior_logprobs, tokens.policy_logprobs.detach()),
            "agreement/mean_abs_logprob_delta": delta,
            "agreement/mean_ratio": importance(tokens),
        }
        maxima = {"agreement/max_abs_logprob_delta": delta}
        if tokens.versions_behind is not None:
            means["staleness/mean_versions_behind"] = tokens.versions_behind
            maxima["staleness/max_versions_behind"] = tokens.versions_behind
        weights = self.correction(tokens)
        if weights is not None:
            per_token = per_token * weights.weight
            means |= {
                "train/correction_mean": weights.weight,
                "train/correction_truncated": weights.truncated,
                "train/correction_masked": weights.masked,
            }
        per_token = per_token + self._regularizers(tokens, means)
        return LossTerms(per_token * token_weights(tokens, self.spec), means, maxima)

    def _regularizers(self, tokens: TokenBatch, means: dict[str, torch.Tensor]) -> torch.Tensor:
        """kl_coef · KL - entropy_coef · H, [tokens]; adds the divergence to `means`."""
        spec, total = self.spec, 0.0 * tokens.advantages
        if spec.kl_coef > 0 and spec.kl_in == "loss":
            reference = required(tokens.reference_logprobs, "reference_logprobs", f"{spec.name} with kl_coef")
            divergence = KL_ESTIMATORS[spec.kl_estimator].estimate(tokens.policy_logprobs, reference.detach())
            means["train/reference_kl"] = divergence.detach()
            total = total + spec.kl_coef * divergence
        if spec.entropy_coef > 0:
            entropy = required(tokens.entropy, "entropy", f"{spec.name} with entropy_coef")
            if tokens.policy_logprobs.requires_grad and not entropy.requires_grad:
                raise MissingInput(
                    f"{spec.name} with entropy_coef needs the entropy with gradient; the batch carries one without, "
                    "and the bonus would change nothing"
                )
            total = total - spec.entropy_coef * entropy
        return total

    def value_loss(self, tokens: ValueBatch) -> LossTerms:
        raise MissingInput(f"{self.spec.name} has no critic: there is no value loss")

    def trains_policy(self, step: int) -> bool:
        return True
