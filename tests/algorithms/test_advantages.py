"""Advantages of samples by group id, for groups of any size and order, and those that differ from token to token."""

import math

import numpy as np
import pytest
import torch
from algorithm_data import random_step, step_tokens, vector
from hypothesis import given
from hypothesis import strategies as st

from slimerl.algorithms import MissingInput, StepTokens, algorithm_of, explained_variance, moments, whiten
from slimerl.algorithms.advantages import group_relative, leave_one_out
from slimerl.algorithms.dapo import overlong_penalty
from slimerl.algorithms.sequences import Sequences
from slimerl.spec.schema import AlgorithmSpec


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


def test_the_leave_one_out_baseline_is_the_mean_of_the_others():
    advantages, figures = leave_one_out([1.0, 0.0, 5.0, 3.0, 2.0], ["a", "a", "b", "a", "b"])
    assert advantages == pytest.approx([1 - 1.5, 0 - 2, 5 - 2, 3 - 0.5, 2 - 5])
    assert figures["train/groups_of_one_fraction"] == 0
    assert leave_one_out([7.0], ["a"]) == ([0.0], {"train/groups_of_one_fraction": 1.0})


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (12, 0), (13, -0.25), (14, -0.5), (16, -1), (20, -1)])
def test_the_overlong_penalty_grows_over_the_buffer(length, penalty):
    assert overlong_penalty(length, limit=16, buffer=4) == penalty


def test_dapo_takes_the_penalty_off_before_samples_are_compared():
    spec = AlgorithmSpec(name="dapo", overlong_limit_tokens=16, overlong_buffer_tokens=4, normalize_by_std=False)
    algorithm = algorithm_of(spec)
    assert algorithm.needs.lengths
    advantages, figures = algorithm.advantages([1.0, 1.0], ["a", "a"], lengths=[3, 16])
    assert advantages == [0.5, -0.5]
    assert figures["train/overlong_fraction"] == 0.5
    with pytest.raises(MissingInput, match="response lengths"):
        algorithm.advantages([1.0, 1.0], ["a", "a"])


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_that_differ_by_token_are_not_given_out_per_sample(name):
    with pytest.raises(MissingInput, match="token_advantages"):
        algorithm_of(AlgorithmSpec(name=name)).advantages([1.0, 0.0], ["a", "a"])


def test_gae_passes_over_tool_tokens_unchanged():
    """Fault: a tool token between two sampled ones discounts, or gives its own value. It has no entry, so the next
    sampled token follows directly: A_0 = δ_0 + γλ·A_1 with δ_0 = γ·V_1 - V_0."""
    algorithm = algorithm_of(AlgorithmSpec(name="ppo", gamma=0.5, gae_lambda=0.5))
    step = StepTokens(vector([1.0]), torch.tensor([0, 0]), 1, values=vector([0.2, 0.4]))
    found = algorithm.token_advantages(step)
    last = 1.0 - 0.4
    first = 0.5 * 0.4 - 0.2 + 0.25 * last
    assert found.advantages.tolist() == pytest.approx([first, last])
    assert found.returns.tolist() == pytest.approx([first + 0.2, 1.0])


def test_the_critics_returns_are_taken_before_whitening():
    step = random_step(1)
    found = algorithm_of(AlgorithmSpec(name="ppo")).token_advantages(step_tokens(step, step.rewards))
    assert torch.allclose(found.returns, found.advantages + vector(step.flat("values")))
    # γ = λ = 1 and no penalty: what is left to be earned is the outcome, at every token
    assert torch.allclose(found.returns, vector(step.over_tokens(step.rewards)))


def test_long_discounted_sums_are_exact():
    algorithm = algorithm_of(AlgorithmSpec(name="reinforce_pp", gamma=0.999))
    lengths = [1, 1000, 37]
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    found = algorithm.token_advantages(StepTokens(vector([2.0, 1.0, -1.0]), sequence, 3)).advantages
    expected = [r * 0.999**back for r, n in zip([2, 1, -1], lengths, strict=True) for back in reversed(range(n))]
    assert torch.allclose(found, vector(expected), rtol=1e-12)


def test_whitened_values_have_mean_zero_and_variance_one_and_equal_ones_become_zero():
    values = 1e3 + torch.randn(500, generator=torch.Generator().manual_seed(1))
    white = whiten(values, moments(values))
    assert white.mean().item() == pytest.approx(0, abs=1e-5)
    assert white.var(correction=0).item() == pytest.approx(1, rel=1e-4)
    equal = torch.full((5,), 3.0)
    assert whiten(equal, moments(equal)).abs().max() == 0
    assert whiten(equal[:0], moments(equal[:0])).shape == (0,)


def test_ppos_policy_waits_until_the_critic_is_warm():
    algorithm = algorithm_of(AlgorithmSpec(name="ppo", value_warmup_steps=2))
    assert [algorithm.trains_policy(step) for step in (1, 2, 3)] == [False, False, True]
    assert algorithm_of(AlgorithmSpec()).trains_policy(1)


@pytest.mark.parametrize(("of", "count"), [([1, 0], 2), ([0, 2], 2), ([-1, 0], 2)])
def test_tokens_out_of_order_or_of_unknown_samples_are_refused(of, count):
    with pytest.raises(ValueError, match="ascending indices"):
        Sequences(torch.tensor(of), count)


def test_a_sample_without_tokens_has_no_last_one():
    with pytest.raises(ValueError, match="sample 1 of the micro-batch has no token"):
        _ = Sequences(torch.tensor([0, 2]), 3).ends


def test_explained_variance_is_that_of_numpy_over_parts_that_add_up():
    generator = torch.Generator().manual_seed(5)
    returns, values = torch.randn(2, 40, generator=generator, dtype=torch.float64) + 3
    errors = returns - values

    def whole(tensor):
        return moments(tensor[:7]) + moments(tensor[7:])

    expected = 1 - np.var(errors.numpy()) / np.var(returns.numpy())
    assert explained_variance(whole(returns), whole(errors)) == pytest.approx(expected)
    assert explained_variance(whole(returns), whole(returns - 5)) == pytest.approx(0), "the mean explains nothing"
    assert explained_variance(whole(returns), whole(0 * returns)) == 1
    assert explained_variance(whole(0 * returns + 1), whole(returns)) == 0, "there is nothing to explain"
