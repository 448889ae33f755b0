"""Advantages and losses by import path: used where they are right, refused by name where they are not."""

import pytest
import torch
from algorithm_data import gradients, random_step, token_batch, vector

from slimerl.algorithms import algorithm_of
from slimerl.algorithms.custom import CustomFunctionError
from slimerl.spec.schema import AlgorithmSpec

STEP = random_step(1)


def custom(**functions):
    return algorithm_of(
        AlgorithmSpec(name="custom", **{key: f"custom_functions:{name}" for key, name in functions.items()})
    )


def batch():
    return token_batch(STEP, STEP.over_tokens([1.0, -0.5] * 5 + [2.0]))


def test_an_own_advantage_is_used_with_grpos_loss():
    algorithm, tokens = custom(advantage_function="only_the_best"), batch()
    assert algorithm.advantages([1.0, 3.0, 2.0], ["a", "a", "b"]) == ([0.0, 1.0, 1.0], {})
    assert torch.equal(algorithm.loss(tokens).per_token, algorithm_of(AlgorithmSpec()).loss(tokens).per_token)


def test_an_own_loss_is_used_with_grpos_advantage_and_all_that_surrounds_a_loss():
    spec = AlgorithmSpec(
        name="custom",
        loss_function="custom_functions:plain_policy_gradient",
        correction="token_tis",
        aggregation="sequence_mean",
    )
    algorithm, tokens = algorithm_of(spec), batch()
    rewards, groups = [1.0, 0.0], ["a", "a"]
    assert algorithm.advantages(rewards, groups) == algorithm_of(AlgorithmSpec()).advantages(rewards, groups)
    [found] = gradients(algorithm.loss(tokens).per_token.sum(), tokens.policy_logprobs)
    weight = (tokens.proximal_logprobs - tokens.behavior_logprobs).exp().clamp(max=2.0)
    per_sample = STEP.totals.tokens / STEP.totals.sequences / vector(STEP.over_tokens(STEP.lengths))
    assert torch.allclose(found, -tokens.advantages * weight * per_sample)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"advantage_function": "no_such"}, "cannot load custom_functions:no_such"),
        ({"advantage_function": "not_a_function"}, "is a Tensor, not a function"),
        ({"advantage_function": "swapped"}, r"takes \(groups, rewards\), it must take \(rewards, groups\)"),
        ({"loss_function": "only_the_best"}, r"takes \(rewards, groups\), it must take \(tokens\)"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_the_run(functions, message):
    with pytest.raises(CustomFunctionError, match=message) as caught:
        custom(**functions)
    assert str(caught.value).startswith(f"algorithm.{next(iter(functions))}")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(CustomFunctionError, match="is it on PYTHONPATH"):
        algorithm_of(AlgorithmSpec(name="custom", loss_function="no_such_module:loss"))


@pytest.mark.parametrize(("name", "message"), [("too_few", "1 numbers for 3 samples"), ("not_finite", "3 of them not")])
def test_bad_advantages_are_refused(name, message):
    with pytest.raises(CustomFunctionError, match=message):
        custom(advantage_function=name).advantages([1.0, 2.0, 3.0], ["a", "a", "a"])


@pytest.mark.parametrize(
    ("name", "message"), [("mean_of_tokens", "one loss per token"), ("without_gradient", "without gradient")]
)
def test_bad_losses_are_refused(name, message):
    with pytest.raises(CustomFunctionError, match=message):
        custom(loss_function=name).loss(batch())


def test_custom_without_any_function_and_a_path_that_is_none_are_refused_by_the_spec():
    with pytest.raises(ValueError, match=r"needs algorithm\.advantage_function"):
        AlgorithmSpec(name="custom")
    with pytest.raises(ValueError, match="pattern"):
        AlgorithmSpec(name="custom", loss_function="just.a.module")
