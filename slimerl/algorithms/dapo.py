"""DAPO: GRPO with a higher upper clip, a token mean over the global batch, a soft penalty for overlong answers, no KL;
groups that teach nothing are replaced (`slimerl/rollout/dynamic_sampling.py`).

Source: arXiv 2503.14476.
"""

from collections.abc import Sequence

from slimerl.algorithms.advantages import group_relative
from slimerl.algorithms.policy_gradient import PolicyGradient
from slimerl.algorithms.terms import MissingInput, Needs, Scores


class Dapo(PolicyGradient):
    @property
    def needs(self) -> Needs:
        spec, common = self.spec, super().needs
        return Needs(
            sequences=common.sequences,
            entropy_gradient=common.entropy_gradient,
            lengths=spec.overlong_limit_tokens is not None,
        )

    def outcomes(self, rewards: Sequence[float], groups: Sequence[str], lengths: Sequence[int] | None = None) -> Scores:
        spec, figures = self.spec, {}
        if spec.overlong_limit_tokens is not None and spec.overlong_buffer_tokens is not None:
            if lengths is None:
                raise MissingInput("dapo with overlong_limit_tokens needs the response lengths of the samples")
            penalties = [overlong_penalty(n, spec.overlong_limit_tokens, spec.overlong_buffer_tokens) for n in lengths]
            rewards = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            figures["train/overlong_fraction"] = sum(p < 0 for p in penalties) / max(1, len(penalties))
        advantages, of_groups = group_relative(rewards, groups, spec.normalize_by_std)
        return advantages, of_groups | figures


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """min(0, -(length - (limit - buffer)) / buffer), at least -1: 0 up to limit - buffer, -1 from the limit on.

    All in tokens.
    """
    return max(-1.0, min(0.0, -(length - (limit - buffer)) / buffer))
