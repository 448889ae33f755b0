"""Losses per token: values, gradients and where they are cut off."""

import math

import pytest
import torch

from slimerl.algorithms import ALGORITHMS, TokenBatch, algorithm_of
from slimerl.algorithms.agreement import k3
from slimerl.algorithms.corrections import truncated_importance
from slimerl.algorithms.policy_loss import DUAL_CLIP, clipped_policy_loss
from slimerl.spec.schema import AlgorithmSpec


def batch(policy, proximal, behavior, advantages) -> TokenBatch:
    values = [torch.tensor(each, dtype=torch.float32) for each in (policy, proximal, behavior, advantages)]
    values[0].requires_grad_()
    return TokenBatch(*values)


def random_batch(count: int = 400) -> TokenBatch:
    random = torch.Generator().manual_seed(1)
    proximal = -3 * torch.rand(count, generator=random)
    policy = (proximal + 0.5 * torch.randn(count, generator=random)).requires_grad_()
    behavior = proximal + 0.3 * torch.randn(count, generator=random)
    return TokenBatch(policy, proximal, behavior, 2 * torch.randn(count, generator=random))


def test_grpos_loss_and_gradient_equal_the_formula_written_out():
    spec = AlgorithmSpec(clip_low=0.2, clip_high=0.3, correction="token_tis", correction_cap=1.2)
    tokens = random_batch()
    terms = algorithm_of(spec).loss(tokens)
    [found] = torch.autograd.grad(terms.per_token.sum(), tokens.policy_logprobs)
    for index in range(len(found)):
        p, o, b, a = (
            float(each[index])
            for each in (
                tokens.policy_logprobs.detach(),
                tokens.proximal_logprobs,
                tokens.behavior_logprobs,
                tokens.advantages,
            )
        )
        ratio, weight = math.exp(p - o), min(math.exp(o - b), 1.2)
        objective, slope = a * ratio, a * ratio
        if a > 0 and ratio > 1.3:
            objective, slope = a * 1.3, 0.0
        if a < 0 and ratio < 0.8:
            objective, slope = a * 0.8, 0.0
        if a < 0 and ratio > 3.0:
            objective, slope = a * 3.0, 0.0
        assert terms.per_token[index].item() == pytest.approx(-weight * objective, rel=1e-4, abs=1e-6)
        assert found[index].item() == pytest.approx(-weight * slope, rel=1e-4, abs=1e-6)
        assert terms.means["train/clip_fraction"][index] == (slope == 0.0)


def test_with_equal_policies_the_gradient_is_that_of_reinforce():
    tokens = batch([-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [0.5, -2.0])
    terms = algorithm_of(AlgorithmSpec()).loss(tokens)
    terms.per_token.sum().backward()
    assert tokens.policy_logprobs.grad.tolist() == [-0.5, 2.0]
    assert terms.means["agreement/mean_abs_logprob_delta"].tolist() == [0.0, 0.0]


def test_a_bad_token_that_became_much_more_likely_is_bounded():
    policy = torch.tensor([0.0], requires_grad=True)
    loss, clipped = clipped_policy_loss(policy, torch.tensor([-5.0]), torch.tensor([-1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert loss.item() == DUAL_CLIP
    assert (policy.grad.item(), clipped.item()) == (0.0, 1.0)


def test_a_huge_difference_stays_finite():
    policy = torch.tensor([0.0, -500.0], requires_grad=True)
    proximal, advantages = torch.tensor([-500.0, 0.0]), torch.tensor([1.0, 1.0])
    loss, _ = clipped_policy_loss(policy, proximal, advantages, 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(policy.grad).all()
    assert torch.isfinite(k3(policy, proximal)).all()


def test_the_correction_is_capped_and_carries_no_gradient():
    proximal = torch.tensor([0.0, -1.0], requires_grad=True)
    weight, truncated = truncated_importance(proximal, torch.tensor([-3.0, -0.5]), cap=2.0)
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert truncated.tolist() == [1.0, 0.0]
    assert not weight.requires_grad


def test_no_correction_is_applied_unless_asked_for():
    tokens = batch([-1.0], [-1.0], [-4.0], [1.0])
    assert algorithm_of(AlgorithmSpec()).loss(tokens).per_token.item() == -1.0


def test_k3_is_zero_for_equal_policies_and_estimates_the_divergence():
    distribution, other = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (distribution * (distribution / other).log()).sum()
    estimate = (distribution * k3(other.log(), distribution.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-5)
    assert k3(other.log(), other.log()).abs().max() == 0


def test_supervised_fine_tuning_is_the_negative_log_likelihood():
    tokens = batch([-1.5, -0.5], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    algorithm = algorithm_of(AlgorithmSpec(name="sft"))
    assert algorithm.loss(tokens).per_token.tolist() == [1.5, 0.5]
    assert algorithm.advantages([0.0, 0.0], ["a", "b"]) == ([1.0, 1.0], {})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_without_tokens_gives_an_empty_loss_and_all_names(name):
    algorithm = algorithm_of(AlgorithmSpec(name=name, correction="token_tis"))
    empty, full = algorithm.loss(batch([], [], [], [])), algorithm.loss(random_batch())
    assert empty.per_token.shape == (0,)
    assert (empty.means.keys(), empty.maxima.keys()) == (full.means.keys(), full.maxima.keys())
