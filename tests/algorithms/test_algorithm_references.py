"""Loss and gradient of every algorithm equal its formula written out, in float64, on unequal groups, lengths, masks."""

import algorithm_reference as formula
import pytest
import torch
from algorithm_data import gradients, random_step, step_tokens, token_batch, value_batch, vector

from slimerl.algorithms import ALGORITHMS, algorithm_of, moments, whiten
from slimerl.spec.schema import AlgorithmSpec

SEEDS = range(4)

CASES = {
    "grpo": {},
    "grpo as published": {"aggregation": "sequence_mean", "clip_high": 0.2, "kl_coef": 0.1, "kl_estimator": "k3"},
    "grpo without deviation": {"normalize_by_std": False},
    "grpo, k2 and entropy": {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.05},
    "grpo, k3+": {"kl_coef": 0.3, "kl_estimator": "k3+", "aggregation": "constant_length", "loss_length_tokens": 9},
    "grpo against behaviour": {"proximal": "behavior"},
    "grpo, token TIS": {"correction": "token_tis", "correction_cap": 1.2},
    "grpo, sequence TIS": {"correction": "sequence_tis", "correction_cap": 1.5},
    "grpo, MIS": {"correction": "mis", "correction_low": 0.8, "correction_high": 1.3},
    "grpo, IcePop": {"correction": "icepop", "aggregation": "sequence_mean"},
    "grpo, geometric rejection": {"correction": "geometric_rejection", "geometric_tolerance": 0.2},
    "dr_grpo": {"name": "dr_grpo", "loss_length_tokens": 16},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "gspo with wide clip, KL and correction": {
        "name": "gspo",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "kl_coef": 0.1,
        "correction": "token_tis",
    },
    "cispo": {"name": "cispo"},
    "cispo with both bounds": {"name": "cispo", "clip_low": 0.1, "clip_high": 0.2},
    "rloo": {"name": "rloo"},
    "reinforce_pp": {"name": "reinforce_pp"},
    "reinforce_pp, KL in the reward": {"name": "reinforce_pp", "kl_coef": 0.2, "kl_in": "reward", "gamma": 0.9},
    "reinforce_pp_baseline": {"name": "reinforce_pp_baseline", "kl_coef": 0.2, "kl_estimator": "k2"},
    "ppo": {"name": "ppo"},
    "ppo, KL in the reward": {
        "name": "ppo",
        "kl_coef": 0.2,
        "kl_in": "reward",
        "gamma": 0.95,
        "gae_lambda": 0.8,
        "entropy_coef": 0.01,
    },
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "decoupled_ppo with cap": {"name": "decoupled_ppo", "behavior_weight_cap": 1.3},
    "distillation": {"name": "distillation", "correction": "token_tis"},
}
TESTED_APART = {"custom", "sft", "dpo", "reward_model"}


def test_every_algorithm_of_the_table_has_a_reference():
    assert {options.get("name", "grpo") for options in CASES.values()} | TESTED_APART == set(ALGORITHMS)


def advantages_of(algorithm, step) -> torch.Tensor:
    """One advantage per counting token, the way the trainer gets them."""
    outcomes, _ = algorithm.outcomes(step.rewards, step.groups)
    found = algorithm.token_advantages(step_tokens(step, outcomes)).advantages
    return whiten(found, moments(found)) if algorithm.needs.whitening else found


def flat(step, rows) -> torch.Tensor:
    return torch.stack([torch.as_tensor(rows[i][t], dtype=torch.float64) for i, t in formula.counting(step)])


def gradient_of(step, loss, rows) -> torch.Tensor:
    return torch.stack(gradients(loss, *[rows[i][t] for i, t in formula.counting(step)]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradient_equal_the_formula(case, seed):
    spec, step = AlgorithmSpec(**CASES[case]), random_step(seed)
    algorithm = algorithm_of(spec)
    advantages = advantages_of(algorithm, step)
    if spec.name != "distillation":
        assert torch.allclose(advantages, flat(step, formula.token_advantages(step, spec)), rtol=1e-9, atol=1e-9)
    tokens = token_batch(step, advantages.tolist())
    loss = algorithm.loss(tokens).per_token.sum() / step.totals.tokens
    by_policy, by_entropy = gradients(loss, tokens.policy_logprobs, tokens.entropy)

    policy, entropy = formula.scalars(step.policy), formula.scalars(step.entropy)
    expected = formula.policy_loss(step, spec, policy, entropy)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(by_policy, gradient_of(step, expected, policy), rtol=1e-9, atol=1e-12)
    assert torch.allclose(by_entropy, gradient_of(step, expected, entropy), rtol=1e-9, atol=1e-12)
    assert by_policy.abs().sum() > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_gaes_returns_equal_the_formula(seed):
    spec, step = AlgorithmSpec(name="ppo", gamma=0.97, gae_lambda=0.9), random_step(seed)
    found = algorithm_of(spec).token_advantages(step_tokens(step, step.rewards))
    advantages, returns = formula.gae(step, spec, step.rewards)
    assert torch.allclose(found.advantages, flat(step, advantages), rtol=1e-9, atol=1e-12)
    assert torch.allclose(found.returns, flat(step, returns), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critics_loss_and_gradient_equal_the_formula(seed):
    step = random_step(seed)
    tokens = value_batch(step)
    terms = algorithm_of(AlgorithmSpec(name="ppo", value_clip=0.3)).value_loss(tokens)
    loss = terms.per_token.sum() / step.totals.tokens
    values = formula.scalars(step.values)
    expected = formula.value_loss(step, 0.3, values)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    [found] = gradients(loss, tokens.values)
    assert torch.allclose(found, gradient_of(step, expected, values), rtol=1e-9, atol=1e-12)
    assert torch.equal(terms.means["critic/clip_fraction"] == 1.0, found == 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpos_loss_and_gradient_equal_the_formula(seed):
    step = random_step(seed, samples=10, pairs=True)
    tokens = token_batch(step, [0.0] * step.totals.tokens)
    loss = algorithm_of(AlgorithmSpec(name="dpo", dpo_beta=0.3)).loss(tokens).per_token.sum() / step.totals.tokens
    policy = formula.scalars(step.policy)
    expected = formula.dpo_loss(step, 0.3, policy)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    [found] = gradients(loss, tokens.policy_logprobs)
    assert torch.allclose(found, gradient_of(step, expected, policy), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margins", [None, [0.0, 0.5, 1.0, 0.1, 0.3]])
def test_the_reward_models_loss_and_gradient_equal_the_formula(margins):
    step = random_step(5, samples=10, pairs=True)
    tokens = value_batch(step, margins=None if margins is None else vector(margins))
    loss = algorithm_of(AlgorithmSpec(name="reward_model")).value_loss(tokens).per_token.sum() / step.totals.tokens
    values = formula.scalars(step.values)
    expected = formula.bradley_terry_loss(step, values, margins or [0.0] * 5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    [found] = gradients(loss, tokens.values)
    assert torch.allclose(found, gradient_of(step, expected, values), rtol=1e-9, atol=1e-12)


def test_supervised_fine_tuning_is_the_mean_negative_log_likelihood():
    step = random_step(2)
    tokens = token_batch(step, [1.0] * step.totals.tokens)
    loss = algorithm_of(AlgorithmSpec(name="sft")).loss(tokens).per_token.sum() / step.totals.tokens
    assert loss.item() == pytest.approx(-sum(step.flat("policy")) / step.totals.tokens, rel=1e-12)
    [found] = gradients(loss, tokens.policy_logprobs)
    assert torch.allclose(found, torch.full_like(found, -1 / step.totals.tokens))
