"""Pairs: which answer is the chosen one, sums over responses, the last real token."""

import math

import pytest
import torch
from algorithm_data import gradients, random_step, token_batch, vector

from slimerl.algorithms import BatchTotals, MissingInput, TokenBatch, ValueBatch, algorithm_of
from slimerl.spec.schema import AlgorithmSpec

PAIR = torch.tensor([0, 0, 0, 1])
TOTALS = BatchTotals(tokens=4, sequences=2, groups=1)


def test_dpo_sums_over_the_response_and_does_not_average():
    """Fault: mean log-probabilities, under which a long answer weighs as little as a short one."""
    policy, reference = vector([-1.0, -1.0, -1.0, -1.0], gradient=True), vector([-1.5, -1.5, -1.5, -1.2])
    tokens = TokenBatch(policy, policy, policy, policy, PAIR, 2, TOTALS, reference_logprobs=reference)
    terms = algorithm_of(AlgorithmSpec(name="dpo")).loss(tokens)
    margin = 0.1 * (3 * 0.5 - 0.2)
    assert terms.per_token.sum().item() / 4 == pytest.approx(math.log(1 + math.exp(-margin)))
    assert terms.means["preference/margin"].mean().item() == pytest.approx(margin)
    assert terms.means["preference/accuracy"].mean().item() == pytest.approx(1.0)


def test_dpo_makes_the_chosen_answer_likelier():
    step = random_step(1, samples=6, pairs=True)
    tokens = token_batch(step, [0.0] * step.totals.tokens)
    loss = algorithm_of(AlgorithmSpec(name="dpo")).loss(tokens).per_token.sum()
    slopes = gradients(loss, tokens.policy_logprobs)[0]
    assert (slopes[tokens.sequence % 2 == 0] < 0).all()
    assert (slopes[tokens.sequence % 2 == 1] > 0).all()


def test_the_reward_model_reads_the_last_token_alone():
    """Fault: a score read at the end of the padded row, or at the end of the whole pack."""
    values = vector([9.0, 9.0, 1.0, -1.0], gradient=True)
    terms = algorithm_of(AlgorithmSpec(name="reward_model")).value_loss(
        ValueBatch(values, sequence=PAIR, sequences=2, totals=TOTALS)
    )
    loss = terms.per_token.sum() / 4
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2.0)))
    slope = 1 / (1 + math.exp(2.0))
    assert gradients(loss, values)[0].tolist() == pytest.approx([0, 0, -slope, slope])


def test_a_margin_asks_for_a_greater_lead():
    values = vector([1.0, 0.0], gradient=True)
    batch = ValueBatch(values, sequence=torch.tensor([0, 1]), sequences=2, totals=BatchTotals(2, 2, 1))
    batch = ValueBatch(**batch.__dict__ | {"margins": vector([1.0])})
    loss = algorithm_of(AlgorithmSpec(name="reward_model")).value_loss(batch).per_token.sum() / 2
    assert loss.item() == pytest.approx(math.log(2))


def test_a_very_wrong_pair_stays_finite():
    values = vector([-1e4, 1e4], gradient=True)
    batch = ValueBatch(values, sequence=torch.tensor([0, 1]), sequences=2, totals=BatchTotals(2, 2, 1))
    loss = algorithm_of(AlgorithmSpec(name="reward_model")).value_loss(batch).per_token.sum() / 2
    assert loss.item() == pytest.approx(2e4)
    assert gradients(loss, values)[0].tolist() == pytest.approx([-1, 1])


def test_a_torn_pair_is_refused():
    step = random_step(1, samples=3)
    with pytest.raises(ValueError, match="3 samples are no pairs"):
        algorithm_of(AlgorithmSpec(name="dpo")).loss(token_batch(step, [0.0] * step.totals.tokens))


def test_a_reward_model_has_no_policy_loss_and_a_policy_no_value_loss():
    step = random_step(1, samples=2)
    with pytest.raises(MissingInput, match="trains no policy"):
        algorithm_of(AlgorithmSpec(name="reward_model")).loss(token_batch(step, [0.0] * step.totals.tokens))
    for name in ("grpo", "dpo"):
        with pytest.raises(MissingInput, match="no value loss"):
            algorithm_of(AlgorithmSpec(name=name)).value_loss(ValueBatch(vector([0.0])))
