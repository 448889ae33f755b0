"""pass@k, majority@k and their intervals, against enumeration of all subsets and against repeated draws."""

import math
import random
from collections import Counter
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from slimerl.rollout.evaluation_statistics import Verdict, estimate, majority_at, pass_at, wilson

RIGHT = "right"
ANSWERS = st.lists(st.sampled_from([RIGHT, "a", "b", "c", None]), min_size=1, max_size=9)


def verdicts_of(answers):
    return [Verdict(answer == RIGHT, None if answer == RIGHT else answer) for answer in answers]


def share_of_subsets(answers, k, score):
    subsets = list(combinations(answers, k))
    return sum(map(score, subsets)) / len(subsets)


def vote(subset):
    """Share of the most frequent answers that is right."""
    votes = Counter(answer for answer in subset if answer is not None)
    winners = [answer for answer, number in votes.items() if number == max(votes.values())]
    return winners.count(RIGHT) / len(winners) if winners else 0.0


@settings(max_examples=80, deadline=None)
@given(ANSWERS, st.data())
def test_pass_at_k_and_majority_at_k_are_means_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    verdicts = verdicts_of(answers)
    assert pass_at(verdicts, k) == pytest.approx(share_of_subsets(answers, k, lambda subset: RIGHT in subset))
    assert majority_at(verdicts, k) == pytest.approx(share_of_subsets(answers, k, vote))


def test_the_naive_estimate_of_pass_at_k_is_another():
    """1 - (1 - p)^k is biased; with 1 right of 4 answers and k = 2 it would be 0.4375."""
    assert pass_at(verdicts_of([RIGHT, "a", "a", "b"]), 2) == 0.5


def test_more_answers_than_there_are_are_refused():
    for of_verdicts in (pass_at, majority_at):
        with pytest.raises(ValueError, match="3 of 2 answers"):
            of_verdicts(verdicts_of([RIGHT, "a"]), 3)


def test_the_interval_of_single_answers_is_that_of_wilsons_paper():
    # 8 of 10: the roots of (p - x)² = z² x(1 - x) / n
    found = estimate([1.0] * 8 + [0.0] * 2)
    for bound in (found.low, found.high):
        assert (0.8 - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 10, rel=1e-5)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_has_a_width_where_all_prompts_came_out_alike(value):
    found = estimate([value] * 20, independent=8)
    assert (found.low, found.high)[value == 0.0] == pytest.approx(abs(value - 0.16), abs=0.01)
    assert found.value == value
    assert 0 <= found.low <= found.high <= 1


def test_many_answers_to_each_prompt_narrow_the_interval_no_further_than_independent_ones_would():
    spread, alike = [0.4, 0.6] * 10, [0.5] * 20
    one = estimate(spread, independent=1)
    assert (one.low, one.high) == pytest.approx(wilson(0.5, 20))
    many = estimate(spread, independent=16)
    assert one.low < many.low < many.high < one.high
    assert (estimate(alike, independent=16).low, estimate(alike, independent=16).high) == wilson(0.5, 320)


@pytest.mark.parametrize(("prompts", "samples", "easy"), [(30, 1, 0.5), (40, 8, 0.5), (40, 8, 0.1)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(prompts, samples, easy):
    """Prompts of very different difficulty: an interval over answers, as if they were independent, fails here."""
    random_numbers, held = random.Random(3), 0
    chances = (0.02, 0.9)
    truth = easy * chances[1] + (1 - easy) * chances[0]
    trials = 400
    for _ in range(trials):
        shares = []
        for _ in range(prompts):
            chance = chances[random_numbers.random() < easy]
            shares.append(sum(random_numbers.random() < chance for _ in range(samples)) / samples)
        found = estimate(shares, samples)
        held += found.low <= truth <= found.high
    assert 0.91 < held / trials <= 1.0


def test_majorities_of_many_answers_are_counted_fast_enough():
    answers = [RIGHT] * 20 + [str(number % 12) for number in range(44)]
    assert 0.5 < majority_at(verdicts_of(answers), 16) < 1.0
    assert math.isclose(majority_at(verdicts_of(answers), 64), 1.0)
