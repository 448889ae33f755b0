"""An algorithm that would not get what it needs is refused before the start, with what is missing."""

import pytest

from slimerl.spec.schema import AlgorithmSpec
from slimerl.training.needs import unsupplied


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "sft"])
def test_what_the_loop_fills_is_trained(name):
    assert unsupplied(AlgorithmSpec(name=name)) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "ppo"}, "token advantages, whitening, critic"),
        ({"name": "grpo", "kl_coef": 0.1}, "reference"),
        ({"name": "distillation"}, "teacher"),
        ({"name": "dapo", "dynamic_sampling_rounds": 3}, "dynamic_sampling_rounds = 3"),
    ],
)
def test_what_it_does_not_fill_is_refused_by_name(spec, message):
    assert any(message in line for line in unsupplied(AlgorithmSpec(**spec)))
