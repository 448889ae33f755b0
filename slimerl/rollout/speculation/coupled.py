"""Coupled reuse: the draw of a token is a function of the policy and of noise that stays the same over the epochs.

Flows in: log-probabilities, keys. Flows out: the engine's own noise, and which tokens of a draft its draw would give.
token = argmax over x of log p(x) + g(x), g Gumbel noise keyed by (seed, position, x). With the seed of the old answer
the old token comes again wherever that argmax has not moved, which is at least (1 - TV) / (1 + TV) of the time.
Given noise that the policy knows nothing of, the draws have its distribution exactly. A policy that was trained on
earlier draws of the same noise does know of it: its samples are then not strictly on-policy.

Invariant: `noise` is that of `engine/inside/keyed_sampler.py`, element for element; a token counts as kept only where
what is known of the distribution leaves no other winner.
"""

import numpy as np

from slimerl.rollout.speculation.rules import Array

# of keyed_sampler.py; that room imports torch, and this one does without
_SEED_STEP = np.int64(-7046029254386353131)
_POSITION_STEP = np.int64(-4658895280553007687)
_COLUMN_STEP = np.int64(-7723592293110705685)
_MIX = np.int64(6364136223846793005)
_ROUNDING = 1e-5
"""Of a sum of float32 probabilities: less than this may be left of one, and not be seen."""


def noise(seeds: Array, positions: Array, columns: int) -> Array:
    """Gumbel noise of every token: [rows, columns], float32, from seeds [rows] and positions [rows].

    The position of a draw is that of the token before it: the first token behind a prompt of 5 is drawn at 4.
    """
    with np.errstate(over="ignore"):  # integers wrap, as torch's do
        rows = _finish((_finish(seeds.astype(np.int64) * _SEED_STEP) ^ positions.astype(np.int64)) * _POSITION_STEP)
        mixed = rows[:, None] + np.arange(1, columns + 1, dtype=np.int64)[None] * _COLUMN_STEP
        mixed = _finish((mixed ^ (mixed >> np.int64(32))) * _MIX)
    uniform = ((mixed >> np.int64(31)) & np.int64(0xFFFFFFFF)).astype(np.float32)
    uniform = np.minimum((uniform + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-uniform))


def _finish(value: Array) -> Array:
    return value ^ (value >> np.int64(29))


def draw(logprobs: Array, gumbel: Array) -> Array:
    """[..., vocabulary] twice → [...]: the token that wins."""
    return (logprobs + gumbel).argmax(axis=-1)


def certain_winner(ids: Array, logprobs: Array, gumbel: Array) -> int:
    """The token that the draw gives, or -1 where a token that is not listed might win.

    Args:
        ids, logprobs: [listed], the most likely tokens, in any order.
        gumbel: [vocabulary].
    """
    scores = logprobs + gumbel[ids]
    best = int(scores.argmax())
    if len(ids) < len(gumbel):
        others = gumbel.copy()
        others[ids] = -np.inf
        left = max(1.0 - float(np.exp(logprobs).sum()), _ROUNDING)
        # an unlisted token is no more likely than the last listed one, nor than all unlisted ones together
        if others.max() + min(float(logprobs.min()), float(np.log(left))) >= scores[best]:
            return -1
    return int(ids[best])
