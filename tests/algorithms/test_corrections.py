"""Weights for what engine and trainer differ in: bounds, masks, and no gradient."""

import math

import pytest
import torch
from algorithm_data import gradients, random_step, token_batch, vector

from slimerl.algorithms import TokenBatch, algorithm_of
from slimerl.algorithms.corrections import CORRECTIONS
from slimerl.spec.algorithm import CORRECTION_OPTIONS
from slimerl.spec.schema import AlgorithmSpec
from slimerl.training.alarms import ALARMS


def weights_of(ratios, sequence, **options):
    """For tokens with these ratios proximal / behaviour."""
    proximal = vector([0.0] * len(ratios), gradient=True)
    behavior = vector([-math.log(ratio) for ratio in ratios])
    tokens = TokenBatch(proximal, proximal, behavior, behavior, torch.tensor(sequence), max(sequence) + 1)
    spec = AlgorithmSpec(**options)
    found = CORRECTIONS[spec.correction].weights(tokens, spec)
    assert not found.weight.requires_grad
    return found


def test_the_table_has_every_correction_of_the_spec():
    assert set(CORRECTIONS) | {"none"} == set(CORRECTION_OPTIONS)


def test_token_tis_caps_each_token():
    found = weights_of([0.5, 1.0, 3.0], [0, 0, 1], correction="token_tis")
    assert found.weight.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert found.truncated.tolist() == [0, 0, 1]


def test_sequence_tis_caps_the_product_of_a_sample():
    found = weights_of([0.5, 1.6, 3.0, 2.0], [0, 0, 1, 1], correction="sequence_tis", correction_cap=5)
    assert found.weight.tolist() == pytest.approx([0.8, 0.8, 5.0, 5.0])
    assert found.truncated.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("name", "kept"), [("mis", [0, 0.6, 1.9, 0, 0]), ("icepop", [0, 0.6, 1.9, 3.0, 0])])
def test_masks_set_outliers_to_zero_and_leave_the_rest(name, kept):
    found = weights_of([0.4, 0.6, 1.9, 3.0, 6.0], [0] * 5, correction=name)
    assert found.weight.tolist() == pytest.approx(kept)
    assert found.masked.tolist() == [float(each == 0) for each in kept]


def test_geometric_rejection_looks_at_the_mean_of_a_whole_sample():
    found = weights_of([1.1, 1 / 1.1, 1.002, 1.002], [0, 0, 1, 1], correction="geometric_rejection")
    assert found.weight.tolist() == [1, 1, 0, 0]
    assert found.masked.tolist() == [0, 0, 1, 1]


def test_m7_masked_and_truncated_fractions_are_reported():
    """Fault: a correction that throws most of a step away in silence."""
    step = random_step(1)
    for name in CORRECTIONS:
        terms = algorithm_of(AlgorithmSpec(correction=name)).loss(token_batch(step, [1.0] * step.totals.tokens))
        touched = terms.means["train/correction_masked"] + terms.means["train/correction_truncated"]
        assert touched.sum() > 0, name
        assert terms.means["train/correction_mean"].shape == touched.shape


def test_m7_every_reported_fraction_has_an_alarm():
    """Fault: a figure under a name that no bound looks at."""
    step = random_step(1)
    terms = algorithm_of(AlgorithmSpec(correction="mis")).loss(token_batch(step, [1.0] * step.totals.tokens))
    fractions = {"train/clip_fraction", "train/correction_masked", "train/correction_truncated"}
    assert fractions <= set(terms.means)
    assert fractions <= {alarm.figure for alarm in ALARMS}


def test_masked_tokens_still_count_in_the_divisor():
    """Fault: dividing by the tokens that are left, which makes the others weigh more, the more are masked."""
    step = random_step(1)
    free, masked = (token_batch(step, [1.0] * step.totals.tokens) for _ in range(2))
    spec = AlgorithmSpec(correction="mis", aggregation="sequence_mean")
    terms = algorithm_of(spec).loss(masked)
    plain = algorithm_of(AlgorithmSpec(aggregation="sequence_mean")).loss(free)
    by_masked = gradients(terms.per_token.sum(), masked.policy_logprobs)[0]
    by_free = gradients(plain.per_token.sum(), free.policy_logprobs)[0]
    weight = (free.proximal_logprobs - free.behavior_logprobs).exp()
    kept = terms.means["train/correction_masked"] == 0
    assert 0 < kept.sum() < len(kept)
    assert torch.allclose(by_masked, torch.where(kept, by_free * weight, 0.0))


def test_against_the_behaviour_policy_the_ratio_is_not_applied_twice():
    """Fault: π_θ/μ in the loss and π_prox/μ again as its weight."""
    with pytest.raises(ValueError, match="count the ratio twice"):
        AlgorithmSpec(proximal="behavior", correction="token_tis")
    with pytest.raises(ValueError, match="correction is not read by decoupled_ppo"):
        AlgorithmSpec(name="decoupled_ppo", correction="mis")
    policy, behavior = vector([-1.0], gradient=True), vector([-1.1])
    tokens = TokenBatch(policy, vector([-5.0]), behavior, vector([1.0]))
    terms = algorithm_of(AlgorithmSpec(proximal="behavior")).loss(tokens)
    assert gradients(terms.per_token.sum(), policy)[0].item() == pytest.approx(-math.exp(0.1))


def test_m2_the_ratio_of_trainer_and_engine_is_in_the_figures_of_every_policy_algorithm():
    """Fault: an algorithm without agreement figures, whose engine may serve other weights unnoticed."""
    step = random_step(2)
    for name in ("grpo", "gspo", "cispo", "ppo", "decoupled_ppo", "distillation"):
        terms = algorithm_of(AlgorithmSpec(name=name)).loss(token_batch(step, [1.0] * step.totals.tokens))
        delta = vector(step.flat("proximal")) - vector(step.flat("behavior"))
        assert torch.allclose(terms.means["agreement/mean_ratio"], delta.exp())
        assert torch.allclose(terms.means["agreement/mean_abs_logprob_delta"], delta.abs())
        assert torch.allclose(terms.maxima["agreement/max_abs_logprob_delta"], delta.abs())
