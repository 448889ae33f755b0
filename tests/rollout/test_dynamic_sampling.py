"""Which groups are worth training on, and when looking for them ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.rollout.dynamic_sampling import GroupCount, InformativeGroups, NothingToLearn, groups_wanted, kind_of


@pytest.mark.parametrize(
    ("correct", "kind"),
    [
        ([True, False], "kept"),
        ([True, True], "all_right"),
        ([False, False], "all_wrong"),
        ([True, None, False], "kept"),
        ([True, None], "all_right"),
        ([None, None], "unknown"),
        ([], "unknown"),
    ],
)
def test_r4_a_group_counts_by_accuracy_alone(correct, kind):
    """Fault: looking at the reward, in which a length penalty makes right answers differ. The verdicts are all that
    the predicate is given."""
    assert kind_of(correct) == kind


def counted(*groups):
    count = GroupCount()
    for group in groups:
        count = count.with_group(group)
    return count


RIGHT, WRONG, MIXED, UNKNOWN = [True, True], [False, False], [True, False], [None, None]


def test_groups_are_counted_by_what_became_of_them():
    assert counted(RIGHT, WRONG, WRONG, MIXED, UNKNOWN, [None, True]) == GroupCount(1, 2, 2, 1)


def test_missing_groups_are_asked_for_until_the_step_is_full():
    assert groups_wanted(2, 4, GroupCount()) == 4
    assert groups_wanted(2, 4, counted(MIXED, WRONG, RIGHT, MIXED)) == 2
    assert groups_wanted(2, 4, counted(MIXED, MIXED, MIXED, MIXED, WRONG)) == 0


def test_without_dynamic_sampling_every_group_is_trained_on():
    assert groups_wanted(0, 4, counted(WRONG, MIXED)) == 2
    assert groups_wanted(0, 4, counted(WRONG, WRONG, RIGHT, UNKNOWN)) == 0
    groups = InformativeGroups(rounds=0, groups_per_step=1)
    for group in (WRONG, RIGHT, UNKNOWN):
        assert groups.add(group) is None
        groups.check()
    assert groups.take_replaced() is None


def test_no_more_is_asked_for_than_the_bound_allows():
    assert groups_wanted(2, 4, counted(*[WRONG] * 7)) == 1


@pytest.mark.parametrize(
    ("group", "advice"), [(WRONG, "easier prompts"), (RIGHT, "harder prompts"), (UNKNOWN, "could not be judged")]
)
def test_r4_when_nothing_passes_it_stops_and_says_why_and_what_to_do(group, advice):
    """Fault: sampling for ever on prompts that are all too hard, or all too easy."""
    with pytest.raises(NothingToLearn) as caught:
        groups_wanted(3, 2, counted(*[group] * 6))
    message = str(caught.value)
    assert "found 0 of 2 groups" in message
    assert "dynamic_sampling_rounds = 3" in message
    assert advice in message


@given(st.lists(st.sampled_from([RIGHT, WRONG, MIXED, UNKNOWN]), max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_the_search_always_ends_within_the_bound(answers, wanted, rounds):
    count, source = GroupCount(), iter(answers + [WRONG] * 100)
    try:
        while asked := groups_wanted(rounds, wanted, count):
            for _ in range(asked):
                count = count.with_group(next(source))
        assert count.kept == wanted
    except NothingToLearn:
        assert count.kept < wanted
        assert count.sampled == rounds * wanted
    assert count.sampled <= rounds * wanted


def test_each_step_has_a_bound_of_its_own():
    groups = InformativeGroups(rounds=2, groups_per_step=2)
    for _ in range(5):
        assert [groups.add(each) for each in (WRONG, MIXED, RIGHT, MIXED)] == [
            "group_all_wrong",
            None,
            "group_all_right",
            None,
        ]
        groups.check()
    assert groups.take_replaced() == [WRONG, RIGHT] * 5
    assert groups.take_replaced() == []
    for each in (UNKNOWN, MIXED, WRONG):
        groups.add(each)
        groups.check()
    groups.add(WRONG)
    with pytest.raises(NothingToLearn, match="found 1 of 2 groups"):
        groups.check()
