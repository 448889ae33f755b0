"""Figures of a step that say that something is wrong. Pure."""

from collections.abc import Mapping

AGREEMENT_BOUND = {"fp32": 1e-3, "bf16": 0.1}
"""Mean |Δ log-probability| between engine and trainer with equal weights. fp32 on one kind of hardware gives about
1e-6; bf16 kernels of two programs differ by some hundredths."""

CLIP_BOUND = 0.5
"""Share of tokens whose gradient a clip cuts off."""


def alarms(figures: Mapping[str, float], dtype: str) -> list[str]:
    """One line for each figure that is out of bounds."""
    found = []
    delta, bound = figures.get("agreement/mean_abs_logprob_delta", 0.0), AGREEMENT_BOUND[dtype]
    if delta > bound and figures.get("rollout/staleness_max", 0.0) == 0:
        found.append(
            f"engine and trainer disagree: mean |Δlogprob| is {delta:.2g}, above {bound:g}, though the samples are of "
            "the present weights; is the temperature the same, and the weight sync verified?"
        )
    clipped = figures.get("train/clip_fraction", 0.0)
    if clipped > CLIP_BOUND:
        found.append(f"{clipped:.0%} of the tokens are clipped; lower training.optimizer.lr or minibatches_per_step")
    return found
