"""Group-relative advantages by group id, for groups of any size and order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimerl.algorithms.advantages import group_relative


def test_m5_groups_are_found_by_id_whatever_their_order_and_size():
    rewards, groups = [1.0, 5.0, 0.0, 0.0, 7.0, 5.0], ["a", "b", "a", "a", "c", "b"]
    advantages, figures = group_relative(rewards, groups, normalize_by_std=True)
    deviation = math.sqrt(1 / 3)
    assert advantages == pytest.approx([2 / 3 / deviation, 0, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0], abs=1e-5)
    assert figures["train/groups_of_one_fraction"] == pytest.approx(1 / 3)


def test_without_normalisation_the_reward_is_only_centred():
    assert group_relative([3.0, 1.0], ["a", "a"], normalize_by_std=False)[0] == [1.0, -1.0]


def test_a_group_of_one_and_a_group_of_equals_have_no_advantage():
    assert group_relative([3.0, 2.0, 2.0], ["a", "b", "b"], normalize_by_std=True)[0] == [0.0, 0.0, 0.0]


samples = st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10)), min_size=1, max_size=40)


@given(samples, st.randoms())
def test_advantages_sum_to_zero_in_each_group_and_do_not_depend_on_the_order(data, random):
    groups, rewards = [str(group) for group, _ in data], [reward for _, reward in data]
    advantages, _ = group_relative(rewards, groups, normalize_by_std=True)
    for group in set(groups):
        assert sum(a for a, g in zip(advantages, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-4)
    order = list(range(len(data)))
    random.shuffle(order)
    mixed, _ = group_relative([rewards[i] for i in order], [groups[i] for i in order], normalize_by_std=True)
    assert mixed == pytest.approx([advantages[i] for i in order], abs=1e-6)
