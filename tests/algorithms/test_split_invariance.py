"""The gradient, the figures and the whitening are the same for every split of the samples over micro-batches."""

import pytest
import torch
from algorithm_data import gradients, random_step, step_tokens, token_batch, value_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithm_references import CASES

from slimerl.algorithms import algorithm_of, moments, whiten
from slimerl.spec.schema import AlgorithmSpec

SAMPLES = 8
splits = st.lists(st.integers(0, 3), min_size=SAMPLES, max_size=SAMPLES)
"""The micro-batch of each sample."""


def parts_of(split, size=1):
    """Indices of the samples of each micro-batch, `size` neighbours always together; empty ones included."""
    return [[i for i in range(SAMPLES) if split[i // size] == part] for part in range(4)]


def by_sample(step, values):
    """Flat token values, cut into samples."""
    return list(values.split(step.lengths))


def whole_and_parts(step, parts, run):
    """`run(part, totals)` → [tokens] tensors; of the whole step, and joined again from its parts."""
    whole = run(step, step.totals)
    pieces = {}
    for part in parts:
        results = run(step.part(part), step.totals)
        for key, values in results.items():
            for index, piece in zip(part, by_sample(step.part(part), values), strict=True):
                pieces[key, index] = piece
    joined = {key: torch.cat([pieces[key, i] for i in range(len(step))]) for key in whole}
    return whole, joined


def assert_same(whole, joined):
    assert whole.keys() == joined.keys()
    for key in whole:
        assert torch.allclose(whole[key], joined[key], rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10, deadline=None)
@given(split=splits, seed=st.integers(0, 100))
def test_m5_loss_and_gradient_of_every_algorithm_do_not_depend_on_the_split(case, split, seed):
    """Fault: a mean over the micro-batch, or group statistics of the samples that happen to be together."""
    step, algorithm = random_step(seed, SAMPLES), algorithm_of(AlgorithmSpec(**CASES[case]))
    of_samples = [0.3 * (i - 3) for i in range(SAMPLES)]
    advantage = {id(row): a for row, a in zip(step.policy, of_samples, strict=True)}

    def run(part, totals):
        tokens = token_batch(part, part.over_tokens([advantage[id(row)] for row in part.policy]), totals)
        terms = algorithm.loss(tokens)
        gradient, entropy = gradients(terms.per_token.sum(), tokens.policy_logprobs, tokens.entropy)
        return {"loss": terms.per_token, "gradient": gradient, "entropy gradient": entropy} | terms.means

    assert_same(*whole_and_parts(step, parts_of(split), run))


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
@settings(max_examples=25, deadline=None)
@given(split=splits, seed=st.integers(0, 100))
def test_pairs_may_be_split_in_any_way_while_each_stays_together(name, split, seed):
    step, algorithm = random_step(seed, SAMPLES, pairs=True), algorithm_of(AlgorithmSpec(name=name))

    def run(part, totals):
        if name == "dpo":
            tokens = token_batch(part, part.over_tokens([0.0] * len(part)), totals)
            terms, leaf = algorithm.loss(tokens), tokens.policy_logprobs
        else:
            tokens = value_batch(part, totals)
            terms, leaf = algorithm.value_loss(tokens), tokens.values
        return {"loss": terms.per_token, "gradient": gradients(terms.per_token.sum(), leaf)[0]} | terms.means

    assert_same(*whole_and_parts(step, parts_of(split, size=2), run))


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "ppo"])
@settings(max_examples=25, deadline=None)
@given(split=splits, seed=st.integers(0, 100))
def test_m5_whitening_is_over_the_whole_step_whatever_the_split(name, split, seed):
    """Fault: whitening each micro-batch or rank by its own mean and deviation."""
    spec = AlgorithmSpec(name=name, kl_coef=0.1, kl_in="reward", gamma=0.9)
    step, algorithm = random_step(seed, SAMPLES), algorithm_of(spec)
    outcomes, _ = algorithm.outcomes(step.rewards, step.groups)
    outcome = {id(row): each for row, each in zip(step.policy, outcomes, strict=True)}

    def run(part, totals):
        found = algorithm.token_advantages(step_tokens(part, [outcome[id(row)] for row in part.policy]))
        return {"advantages": found.advantages} | ({"returns": found.returns} if found.returns is not None else {})

    parts = parts_of(split)
    of_parts = sum(moments(run(step.part(part), None)["advantages"]) for part in parts)

    def run_whitened(part, totals):
        found = run(part, totals)
        return found | {"white": whiten(found["advantages"], of_parts)}

    whole, joined = whole_and_parts(step, parts, run_whitened)
    assert_same(whole, joined)
    assert whole["white"].mean().abs() < 1e-9
    assert whole["white"].square().mean().item() == pytest.approx(1, rel=1e-4)


def test_a_mean_over_the_micro_batch_would_depend_on_the_split():
    """What the totals protect from: with each part's own totals the gradients differ."""
    step, algorithm = random_step(3, SAMPLES), algorithm_of(AlgorithmSpec(aggregation="sequence_mean"))
    whole = algorithm.loss(token_batch(step, [1.0] * step.totals.tokens)).per_token
    parts = [step.part(range(3)), step.part(range(3, SAMPLES))]
    wrong = torch.cat([algorithm.loss(token_batch(part, [1.0] * part.totals.tokens)).per_token for part in parts])
    assert not torch.allclose(whole, wrong)
