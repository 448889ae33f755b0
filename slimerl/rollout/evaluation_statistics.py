"""What the answers to held-out prompts say of the policy: pass@k, majority@k, and how sure that is. Pure.

Flows in: for each prompt its judged answers. Flows out: estimates with confidence intervals.

pass@k is the chance that one of k answers is right; majority@k, that the answer most of k give is. Both are estimated
without bias from n ≥ k answers, as the mean over all subsets of k of them (pass@k: Chen et al. 2021, arXiv 2107.03374).

The intervals are Wilson's (1927), over prompts, with an effective number of them. Prompts are the independent units:
answers to one prompt are not, and a bootstrap over prompts would be the other way to say so. But that has no width
where all prompts are answered right or all wrong, which small or easy sets are, and wants random numbers. A prompt's
estimate lies between 0 and 1, so that its variance is at most p(1 - p), that of a single answer: with the number of
prompts the interval would be too wide where there are many answers to each. The effective number is therefore that of
single answers with the variance that is seen (the design effect of survey sampling, Kish 1965), at least the number of
prompts, and at most that of independent estimates there could be, k answers each.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged answer. `said`: equal for answers that are the same; None: the response holds none and has no vote."""

    correct: bool
    said: Hashable = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A probability, and the interval that holds it with `CONFIDENCE`."""

    value: float
    low: float
    high: float


def pass_at(verdicts: Sequence[Verdict], k: int) -> float:
    """Share of the subsets of `k` answers that hold a right one. Raises ValueError: there are fewer than `k`."""
    _check(verdicts, k)
    wrong = sum(not verdict.correct for verdict in verdicts)
    return 1.0 - math.comb(wrong, k) / math.comb(len(verdicts), k)


def majority_at(verdicts: Sequence[Verdict], k: int) -> float:
    """Share of the subsets of `k` answers whose most frequent answer is right; of answers that are equally frequent
    each is taken equally often. Right answers are one answer. Raises ValueError: there are fewer than `k`.

    For each number of votes that the right answer may get and each number of wrong ones that draw with it, the subsets
    are counted: one wrong answer after the other, by votes used and draws so far.
    """
    _check(verdicts, k)
    right = sum(verdict.correct for verdict in verdicts)
    votes = Counter(verdict.said for verdict in verdicts if not verdict.correct and verdict.said is not None)
    if k == len(verdicts):
        most = max([right, *votes.values()])
        return (right == most) / sum(count == most for count in [right, *votes.values()]) if most else 0.0
    silent = len(verdicts) - right - sum(votes.values())
    won = 0.0
    for most in range(1, min(right, k) + 1):
        by_draws = _subsets(list(votes.values()), silent, k - most, most)
        won += math.comb(right, most) * sum(ways / (draws + 1) for draws, ways in by_draws.items())
    return won / math.comb(len(verdicts), k)


def _subsets(votes: Sequence[int], silent: int, size: int, most: int) -> dict[int, int]:
    """How many subsets of `size` of the other answers give none more than `most` votes, by how many get just that."""
    ways = {(0, 0): 1}
    for count in votes:
        grown: Counter[tuple[int, int]] = Counter()
        for (used, draws), number in ways.items():
            for taken in range(min(count, most, size - used) + 1):
                grown[used + taken, draws + (taken == most)] += number * math.comb(count, taken)
        ways = dict(grown)
    by_draws: Counter[int] = Counter()
    for (used, draws), number in ways.items():
        by_draws[draws] += number * math.comb(silent, size - used)
    return by_draws


def estimate(per_prompt: Sequence[float], independent: int = 1) -> Estimate:
    """The mean over prompts, with its interval.

    Args:
        per_prompt: between 0 and 1; at least one.
        independent: estimates of each prompt that share no answer: answers // k.
    """
    count, mean = len(per_prompt), fmean(per_prompt)
    spread = variance(per_prompt) if count > 1 else 0.0
    effective = float(count)
    if 0 < mean < 1:
        most = count * independent
        effective = min(max(count, count * mean * (1 - mean) / spread), most) if spread > 0 else float(most)
    low, high = wilson(mean, effective)
    return Estimate(mean, low, high)


def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's interval of a share that was seen in so many independent trials."""
    centre = share + _Z**2 / (2 * trials)
    reach = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    low, high = ((centre + sign * reach) / (1 + _Z**2 / trials) for sign in (-1, 1))
    # where all are right or all wrong the bound is the share itself, but for rounding
    return (0.0 if share == 0 else max(0.0, low)), (1.0 if share == 1 else min(1.0, high))


def _check(verdicts: Sequence[Verdict], k: int) -> None:
    if not 1 <= k <= len(verdicts):
        raise ValueError(f"{k} of {len(verdicts)} answers: k is at least 1, and at most the number of answers")
