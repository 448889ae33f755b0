"""Which groups are worth training on, and when looking for them ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.algorithms.dynamic_sampling import GroupCount, NothingToLearn, groups_wanted, is_informative
from slimerl.spec.schema import AlgorithmSpec


@pytest.mark.parametrize(
    ("correct", "informative"),
    [
        ([True, False], True),
        ([True, True], False),
        ([False, False], False),
        ([True, None, False], True),
        ([True, None], False),
        ([None, None], False),
        ([], False),
    ],
)
def test_r4_a_group_counts_by_accuracy_alone(correct, informative):
    """Fault: looking at the reward, in which a length penalty makes right answers differ. The verdicts are all that
    the predicate is given."""
    assert is_informative(correct) is informative


def counted(*groups):
    count = GroupCount()
    for group in groups:
        count = count.with_group(group)
    return count


def dapo(rounds):
    return AlgorithmSpec(name="dapo", dynamic_sampling_rounds=rounds)


RIGHT, WRONG, MIXED, UNKNOWN = [True, True], [False, False], [True, False], [None, None]


def test_groups_are_counted_by_what_became_of_them():
    assert counted(RIGHT, WRONG, WRONG, MIXED, UNKNOWN, [None, True]) == GroupCount(1, 2, 2, 1)


def test_missing_groups_are_asked_for_until_the_step_is_full():
    assert groups_wanted(dapo(2), 4, GroupCount()) == 4
    assert groups_wanted(dapo(2), 4, counted(MIXED, WRONG, RIGHT, MIXED)) == 2
    assert groups_wanted(dapo(2), 4, counted(MIXED, MIXED, MIXED, MIXED, WRONG)) == 0


@pytest.mark.parametrize("spec", [dapo(0), AlgorithmSpec()])
def test_without_dynamic_sampling_every_group_is_trained_on(spec):
    assert groups_wanted(spec, 4, counted(WRONG, MIXED)) == 2
    assert groups_wanted(spec, 4, counted(WRONG, WRONG, RIGHT, UNKNOWN)) == 0


def test_no_more_is_asked_for_than_the_bound_allows():
    assert groups_wanted(dapo(2), 4, counted(*[WRONG] * 7)) == 1


@pytest.mark.parametrize(
    ("group", "advice"), [(WRONG, "easier prompts"), (RIGHT, "harder prompts"), (UNKNOWN, "could not be judged")]
)
def test_r4_when_nothing_passes_it_stops_and_says_why_and_what_to_do(group, advice):
    """Fault: sampling for ever on prompts that are all too hard, or all too easy."""
    with pytest.raises(NothingToLearn) as caught:
        groups_wanted(dapo(3), 2, counted(*[group] * 6))
    message = str(caught.value)
    assert "found 0 of 2 groups" in message
    assert "dynamic_sampling_rounds = 3" in message
    assert advice in message


@given(st.lists(st.sampled_from([RIGHT, WRONG, MIXED, UNKNOWN]), max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_the_search_always_ends_within_the_bound(answers, wanted, rounds):
    count, source = GroupCount(), iter(answers + [WRONG] * 100)
    try:
        while asked := groups_wanted(dapo(rounds), wanted, count):
            for _ in range(asked):
                count = count.with_group(next(source))
        assert count.kept == wanted
    except NothingToLearn:
        assert count.kept < wanted
        assert count.sampled == rounds * wanted
    assert count.sampled <= rounds * wanted
