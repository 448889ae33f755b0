"""GRPO: samples of one prompt compared with each other, PPO's clipped loss, no critic, no KL term.

Source: DeepSeekMath (arXiv 2402.03300), with DAPO's separate upper clip and token mean over the global batch.
"""

from collections.abc import Sequence

from slimerl.algorithms.advantages import group_relative
from slimerl.algorithms.agreement import k3
from slimerl.algorithms.corrections import truncated_importance
from slimerl.algorithms.policy_loss import clipped_policy_loss
from slimerl.algorithms.terms import LossTerms, TokenBatch
from slimerl.spec.schema import AlgorithmSpec


class Grpo:
    def __init__(self, spec: AlgorithmSpec) -> None:
        self._spec = spec

    def advantages(self, rewards: Sequence[float], groups: Sequence[str]) -> tuple[list[float], dict[str, float]]:
        return group_relative(rewards, groups, self._spec.normalize_by_std)

    def loss(self, tokens: TokenBatch) -> LossTerms:
        spec = self._spec
        per_token, clipped = clipped_policy_loss(
            tokens.policy_logprobs, tokens.proximal_logprobs, tokens.advantages, spec.clip_low, spec.clip_high
        )
        delta = (tokens.proximal_logprobs.detach() - tokens.behavior_logprobs).abs()
        means = {
            "train/clip_fraction": clipped,
            "train/approx_kl": k3(tokens.policy_logprobs, tokens.behavior_logprobs),
            "agreement/mean_abs_logprob_delta": delta,
        }
        if spec.correction == "token_tis":
            weight, truncated = truncated_importance(
                tokens.proximal_logprobs, tokens.behavior_logprobs, spec.correction_cap
            )
            per_token = per_token * weight
            means |= {"train/correction_mean": weight, "train/correction_truncated": truncated}
        return LossTerms(per_token, means, {"agreement/max_abs_logprob_delta": delta})
