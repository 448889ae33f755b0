"""Losses per token: values, gradients and where they are cut off; the pitfalls of each formula."""

import dataclasses
import math

import pytest
import torch
from algorithm_data import gradients, random_step, token_batch, vector

from slimerl.algorithms import BatchTotals, MissingInput, TokenBatch, algorithm_of
from slimerl.algorithms.kl import k3
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


def test_no_correction_is_applied_unless_asked_for():
    tokens = batch([-1.0], [-1.0], [-4.0], [1.0])
    assert algorithm_of(AlgorithmSpec()).loss(tokens).per_token.item() == -1.0


def test_supervised_fine_tuning_is_the_negative_log_likelihood():
    tokens = batch([-1.5, -0.5], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    algorithm = algorithm_of(AlgorithmSpec(name="sft"))
    assert algorithm.loss(tokens).per_token.tolist() == [1.5, 0.5]
    assert algorithm.advantages([0.0, 0.0], ["a", "b"]) == ([1.0, 1.0], {})


def test_m7_clipped_tokens_are_marked_whatever_the_algorithm():
    """Fault: an algorithm that clips without saying how often."""
    step = random_step(1)
    for name in ("grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "decoupled_ppo", "distillation"):
        tokens = token_batch(step, step.over_tokens([1.0, -1.0] * 5 + [1.0]))
        terms = algorithm_of(AlgorithmSpec(name=name, clip_low=0.2, clip_high=0.2)).loss(tokens)
        marked = terms.means["train/clip_fraction"]
        assert 0 < marked.mean() < 1, name
        if name != "cispo":
            assert torch.equal(marked == 1, gradients(terms.per_token.sum(), tokens.policy_logprobs)[0] == 0), name


def test_cispo_keeps_the_gradient_of_every_token():
    step = random_step(1)
    tokens = token_batch(step, step.over_tokens([1.0, -1.0] * 5 + [1.0]))
    terms = algorithm_of(AlgorithmSpec(name="cispo", clip_high=0.01)).loss(tokens)
    assert terms.means["train/clip_fraction"].sum() > 0
    assert (gradients(terms.per_token.sum(), tokens.policy_logprobs)[0] != 0).all()


def test_cispo_has_no_lower_bound_by_default():
    tokens = batch([-5.0], [-1.0], [-1.0], [1.0])
    algorithm_of(AlgorithmSpec(name="cispo")).loss(tokens).per_token.sum().backward()
    assert tokens.policy_logprobs.grad.item() == pytest.approx(-math.exp(-4.0))


def test_gspos_tokens_share_one_ratio_and_the_gradient_of_the_sequence():
    policy, proximal = vector([-1.0, -2.0, -0.5], gradient=True), vector([-1.1, -1.7, -0.5])
    tokens = TokenBatch(policy, proximal, proximal, vector([2.0] * 3), torch.tensor([0, 0, 0]), 1, BatchTotals(3, 1, 1))
    terms = algorithm_of(AlgorithmSpec(name="gspo", clip_low=0.5, clip_high=0.5)).loss(tokens)
    ratio = math.exp((0.1 - 0.3 + 0.0) / 3)
    assert terms.per_token.tolist() == pytest.approx([-2 * ratio] * 3)
    [found] = gradients(terms.per_token.sum() / 3, policy)
    whole = -2.0 * ((policy - proximal).mean()).exp()
    assert torch.allclose(found, gradients(whole, policy)[0])


def test_dr_grpos_divisor_is_a_constant_and_not_a_width():
    """Fault: dividing by the longest response of the batch, so that a neighbour's length changes the gradient."""
    algorithm = algorithm_of(AlgorithmSpec(name="dr_grpo", loss_length_tokens=10))
    short, long = random_step(1, samples=1), random_step(2, samples=1)
    short.sampled, long.sampled = [[True] * len(short.policy[0])], [[True] * len(long.policy[0])]
    alone = token_batch(short, [1.0] * short.totals.tokens)
    assert len(short.policy[0]) != len(long.policy[0])
    loss = algorithm.loss(alone).per_token.sum() / short.totals.tokens
    by_hand = algorithm_of(AlgorithmSpec()).loss(alone).per_token.sum() / 10
    assert loss.item() == pytest.approx(by_hand.item())


def test_decoupled_ppo_clips_around_the_proximal_policy_and_not_around_the_one_that_sampled():
    """Fault: one ratio for both, which clips a token because its sample is old."""
    tokens = batch([-1.0], [-1.0], [-2.0], [1.0])
    terms = algorithm_of(AlgorithmSpec(name="decoupled_ppo")).loss(tokens)
    terms.per_token.sum().backward()
    assert tokens.policy_logprobs.grad.item() == pytest.approx(-math.e)
    assert terms.means["train/clip_fraction"].item() == 0
    tokens = batch([-1.0], [-1.0], [-2.0], [1.0])
    algorithm_of(AlgorithmSpec(proximal="behavior")).loss(tokens).per_token.sum().backward()
    assert tokens.policy_logprobs.grad.item() == 0


def test_distillation_pushes_towards_the_teacher_and_reports_the_divergence():
    step = random_step(4)
    tokens = token_batch(step, [0.0] * step.totals.tokens)
    tokens = dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs.detach())
    terms = algorithm_of(AlgorithmSpec(name="distillation")).loss(tokens)
    [found] = gradients(terms.per_token.sum(), tokens.policy_logprobs)
    assert torch.allclose(found, tokens.policy_logprobs.detach() - tokens.teacher_logprobs)
    assert torch.allclose(terms.means["train/teacher_kl"], found)


def test_the_proximal_policy_never_gets_a_gradient():
    """Fault: with one minibatch proximal and policy are one tensor; a ratio of it with itself has no gradient."""
    step = random_step(4)
    for options in ({}, {"name": "gspo"}, {"name": "cispo"}, {"correction": "token_tis"}, {"name": "distillation"}):
        detached = token_batch(step, step.over_tokens([1.0] * 11))
        detached = dataclasses.replace(detached, proximal_logprobs=detached.policy_logprobs.detach())
        shared = dataclasses.replace(detached, proximal_logprobs=detached.policy_logprobs)
        algorithm = algorithm_of(AlgorithmSpec(**options))
        expected, found = (
            gradients(algorithm.loss(each).per_token.sum(), detached.policy_logprobs)[0] for each in (detached, shared)
        )
        assert torch.equal(found, expected)
        assert found.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"aggregation": "sequence_mean"}, "totals"),
        ({"aggregation": "sequence_mean"}, "sequence"),
        ({"name": "dr_grpo", "loss_length_tokens": 8}, "totals"),
        ({"name": "gspo"}, "sequence"),
        ({"correction": "sequence_tis"}, "sequence"),
        ({"correction": "geometric_rejection"}, "sequence"),
        ({"kl_coef": 0.1}, "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"name": "distillation"}, "teacher_logprobs"),
        ({"name": "dpo"}, "reference_logprobs"),
        ({"name": "dpo"}, "totals"),
    ],
)
def test_what_a_formula_needs_and_does_not_get_is_named(options, missing):
    step = random_step(1, samples=4, pairs=True)
    tokens = dataclasses.replace(token_batch(step, [1.0] * step.totals.tokens), **{missing: None})
    with pytest.raises(MissingInput, match=rf"\b{missing}\b"):
        algorithm_of(AlgorithmSpec(**options)).loss(tokens)


def test_an_entropy_without_gradient_is_refused_since_the_bonus_would_do_nothing():
    step = random_step(1)
    tokens = token_batch(step, [1.0] * step.totals.tokens)
    tokens = dataclasses.replace(tokens, entropy=tokens.entropy.detach())
    with pytest.raises(MissingInput, match="entropy with gradient"):
        algorithm_of(AlgorithmSpec(entropy_coef=0.1)).loss(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "gspo", "kl_coef": 0.1},
        {"aggregation": "sequence_mean", "entropy_coef": 0.1},
        {"correction": "sequence_tis"},
        {"correction": "geometric_rejection"},
        {"name": "decoupled_ppo"},
        {"name": "distillation"},
        {"name": "dpo"},
        {"name": "sft"},
    ],
)
def test_a_micro_batch_without_tokens_gives_an_empty_loss_and_all_names(options):
    step = random_step(1, samples=4, pairs=True)
    algorithm, none = algorithm_of(AlgorithmSpec(**options)), step.part([])
    full = algorithm.loss(token_batch(step, [1.0] * step.totals.tokens))
    empty = algorithm.loss(token_batch(none, [], step.totals))
    assert empty.per_token.shape == (0,)
    assert empty.per_token.requires_grad
    assert (empty.means.keys(), empty.maxima.keys()) == (full.means.keys(), full.maxima.keys())


def test_staleness_is_reported_per_token_where_it_is_known():
    step = random_step(1)
    tokens = token_batch(step, [1.0] * step.totals.tokens)
    behind = torch.arange(step.totals.tokens)
    terms = algorithm_of(AlgorithmSpec()).loss(dataclasses.replace(tokens, versions_behind=behind))
    assert torch.equal(terms.means["staleness/mean_versions_behind"], behind)
    assert torch.equal(terms.maxima["staleness/max_versions_behind"], behind)
