"""An algorithm that would not get what it needs is refused before the start, with what is missing."""

import pytest

from slimerl.algorithms import ALGORITHMS, algorithm_of
from slimerl.spec.algorithm import ALGORITHM_OPTIONS, AlgorithmSpec
from slimerl.training.needs import unsupplied


@pytest.mark.parametrize(
    "name",
    [
        *("grpo", "gspo", "cispo", "rloo", "dapo", "reinforce_pp", "reinforce_pp_baseline", "ppo"),
        *("sft", "dpo", "reward_model"),
    ],
)
def test_what_the_loop_fills_is_trained(name):
    assert unsupplied(AlgorithmSpec(name=name)) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "distillation"}, "needs a teacher; set algorithm.teacher_path to a checkpoint of one"),
    ],
)
def test_what_it_does_not_fill_is_refused_by_name(spec, message):
    assert any(message in line for line in unsupplied(AlgorithmSpec(**spec)))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "custom"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_the_spec_knows_which_algorithms_have_a_reference_model_a_critic_or_pairs(name, kl_coef):
    options = {"loss_length_tokens": 9} if name == "dr_grpo" else {}
    if "kl_coef" in ALGORITHM_OPTIONS[name]:
        options["kl_coef"] = kl_coef
    spec = AlgorithmSpec(name=name, **options)
    needs = algorithm_of(spec).needs
    assert (spec.has_reference_model, spec.has_critic, spec.trains_on_pairs) == (
        *(needs.reference, needs.critic, needs.pairs),
    )
