"""How much of a draft is kept, tier by tier. Pure: arrays in, arrays out.

Flows in: log-probabilities of a draft's tokens under the policy, and uniform noise. Flows out: how many tokens are
kept, and the log-probability with which the token behind them is drawn.

Exact (speculative decoding with a deterministic draft; Leviathan et al. 2023, Chen et al. 2023): keep d with
probability p(d); where it is rejected, draw from p given "not d", which is the residual of that rule. Every token then
has the policy's distribution, whatever the draft was, as long as the draft knows nothing of the noise.
Invariant of the exact tier: a position's noise decides once. Whoever has seen it reject draws the residual and nothing
else: to draw again from p, or to decide again with other weights, would favour d.

Lenient (SPEC-RL): keep an old token with probability min(1, l * p_new / p_old); at the first rejection go on from
p_new. Not the policy's distribution even at l = 1, since the rejected position is drawn from p_new and not from the
residual; `lenient_law` says what it is.
"""

from typing import TypeAlias

import numpy as np
import xxhash

Array: TypeAlias = np.ndarray


def kept(acceptance: Array, uniforms: Array) -> Array:
    """Tokens before the first rejection.

    Args:
        acceptance: [..., tokens], the probability that each is kept once those before it are.
        uniforms: [..., tokens], in [0, 1).

    Returns:
        [...], between 0 and `tokens`.
    """
    rejected = np.concatenate([uniforms >= acceptance, np.ones((*np.shape(acceptance)[:-1], 1), dtype=bool)], axis=-1)
    return rejected.argmax(axis=-1)


def exact_acceptance(logprobs: Array) -> Array:
    return np.exp(logprobs)


def residual_logprob(drawn: Array | float, rejected: Array | float) -> Array:
    """Log-probability of a token that was drawn behind a rejection.

    Args:
        drawn: its log-probability among all tokens but the rejected one.
        rejected: the log-probability that the rejected token was kept with.
    """
    with np.errstate(divide="ignore"):  # a token of probability one is never rejected
        return drawn + np.log(-np.expm1(rejected))


def lenient_acceptance(new: Array, old: Array, lenience: float) -> Array:
    """`new`, `old`: log-probabilities of the same tokens under the policy now and when they were drawn."""
    return np.minimum(1.0, lenience * np.exp(np.minimum(new - old, 700.0)))


def lenient_law(new: Array, old: Array, lenience: float) -> Array:
    """Distribution of a token that the lenient rule gives: a draft token from `old`, and `new` where it is rejected.

    Args:
        new, old: [..., vocabulary], probabilities.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        acceptance = np.where(old > 0, np.minimum(1.0, lenience * new / old), 0.0)
    taken = old * acceptance
    return taken + (1 - taken.sum(axis=-1, keepdims=True)) * new


def lenient_bias(new: Array, old: Array, lenience: float) -> float:
    """Estimate of the total variation between `lenient_law` and the policy, from draft tokens alone.

    TV = E over drafts of |a - A r| / 2, a the acceptance, A its mean, r = p_new / p_old; as if all positions had one A.

    Args:
        new, old: [tokens], log-probabilities of the draft's tokens.
    """
    if not len(new):
        return 0.0
    acceptance = lenient_acceptance(new, old, lenience)
    ratio = np.exp(np.minimum(new - old, 700.0))
    return float(np.mean(np.abs(acceptance - acceptance.mean() * ratio)) / 2)


def total_variation(one: Array, other: Array) -> float:
    """Between two distributions over the same things: the largest difference of any event's probability."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).sum() / 2)


def keyed_uniforms(seed: int, sample: str, start: int, count: int) -> Array:
    """Noise of the acceptances of a sample at the positions from `start` on: [count], in [0, 1).

    A stream of its own beside the engine's draws; the same in a run that is repeated. Float64, 53 bits."""
    keys = [f"{seed}/{sample}/accept/{place}" for place in range(start, start + count)]
    hashes = [xxhash.xxh64_intdigest(key.encode()) for key in keys]
    return (np.array(hashes, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
