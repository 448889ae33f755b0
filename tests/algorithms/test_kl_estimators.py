"""Estimators of the divergence: values and gradients in expectation, exactly, over a small vocabulary."""

import pytest
import torch
from algorithm_data import gradients

from slimerl.algorithms.kl import KL_ESTIMATORS, k3
from slimerl.spec.schema import AlgorithmSpec

LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
POLICY = LOGITS.log_softmax(0)
REFERENCE = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
FORWARD = (POLICY.exp() * (POLICY - REFERENCE)).sum()
"""KL(policy ‖ reference), the one to be penalised."""
REVERSE = (REFERENCE.exp() * (REFERENCE - POLICY)).sum()


def expected_value(name):
    return (POLICY.exp() * KL_ESTIMATORS[name].estimate(POLICY, REFERENCE)).sum().item()


def expected_gradient(name):
    """What a loss gets: samples come from the policy, the gradient flows through the estimate alone."""
    return gradients((POLICY.exp().detach() * KL_ESTIMATORS[name].estimate(POLICY, REFERENCE)).sum(), LOGITS)[0]


@pytest.mark.parametrize("name", ["k1", "k3", "k3+"])
def test_the_unbiased_estimators_have_the_divergence_as_mean(name):
    assert expected_value(name) == pytest.approx(FORWARD.item(), rel=1e-12)


def test_k2_is_biased():
    assert abs(expected_value("k2") - FORWARD.item()) > 0.005


@pytest.mark.parametrize("name", ["k2", "k3+"])
def test_k2_and_k3_plus_have_the_gradient_of_the_divergence(name):
    assert torch.allclose(expected_gradient(name), gradients(FORWARD, LOGITS)[0], atol=1e-12)


def test_k1_has_no_expected_gradient_and_is_refused_in_the_loss():
    assert expected_gradient("k1").abs().max() < 1e-12
    with pytest.raises(ValueError, match="no expected gradient in the loss"):
        AlgorithmSpec(kl_coef=0.1, kl_estimator="k1")


def test_k3_has_the_gradient_of_the_other_direction():
    found = expected_gradient("k3")
    assert torch.allclose(found, gradients(REVERSE, LOGITS)[0], atol=1e-12)
    assert not torch.allclose(found, gradients(FORWARD, LOGITS)[0], atol=1e-2)


def test_k3_is_never_negative_and_zero_for_equal_policies():
    assert (k3(POLICY, REFERENCE) >= 0).all()
    assert k3(POLICY, POLICY).abs().max() == 0


def test_k3_plus_has_no_meaning_in_a_reward_and_k1_is_the_default_there():
    assert AlgorithmSpec(name="ppo", kl_in="reward", kl_coef=0.1).kl_estimator == "k1"
    with pytest.raises(ValueError, match="a reward has no gradient"):
        AlgorithmSpec(name="ppo", kl_in="reward", kl_estimator="k3+")
