"""Options of the spec: read or refused, defaults by algorithm, written as they are read; and the generated table."""

import re
from pathlib import Path

import algorithm_table
import pytest
import yaml

import slimerl.algorithms
from slimerl.algorithms import ALGORITHMS, algorithm_of
from slimerl.spec import SpecError
from slimerl.spec.algorithm import ALGORITHM_OPTIONS, CORRECTION_OPTIONS, AlgorithmSpec
from slimerl.spec.load import dump_spec, spec_from_tree

REQUIRED = algorithm_table.EXAMPLES


def tree(**algorithm):
    return {
        "name": "tiny",
        "model": {"path": "m"},
        "data": {"train_path": "t.jsonl"},
        "training": {"steps": 3, "prompts_per_step": 2},
        "rollout": {"max_new_tokens": 64},
        "algorithm": algorithm,
    }


def refusal(**algorithm):
    with pytest.raises(SpecError) as caught:
        spec_from_tree(tree(**algorithm), "spec.yaml")
    return str(caught.value)


def test_table_and_spec_have_the_same_names():
    assert set(ALGORITHMS) == set(ALGORITHM_OPTIONS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_written_spec_has_what_the_algorithm_reads_and_loads_to_an_equal_one(name):
    spec = spec_from_tree(tree(name=name, **REQUIRED.get(name, {})), "spec.yaml")
    written = yaml.safe_load(dump_spec(spec))
    assert set(written["algorithm"]) <= set(ALGORITHM_OPTIONS[name]) | set(REQUIRED.get(name, {})) | {"name"}
    assert spec_from_tree(written, "dump") == spec


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "custom"])
def test_every_option_of_every_algorithm_is_refused_elsewhere(name):
    others = {key for options in ALGORITHM_OPTIONS.values() for key in options} - set(ALGORITHM_OPTIONS[name])
    for key in others:
        default = AlgorithmSpec.model_fields[key].default
        message = refusal(name=name, **{**REQUIRED.get(name, {}), key: default if default is not None else 1})
        assert f"algorithm.{key} is not read by {name}" in message


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("grpo", "clip_high", 0.28),
        ("ppo", "clip_high", 0.2),
        ("gspo", "clip_low", 3e-4),
        ("gspo", "clip_high", 4e-4),
        ("gspo", "aggregation", "sequence_mean"),
        ("cispo", "clip_low", 1.0),
        ("dapo", "dynamic_sampling_rounds", 10),
        ("dpo", "dpo_beta", 0.1),
    ],
)
def test_defaults_are_those_of_the_algorithm(name, key, value):
    assert getattr(AlgorithmSpec(name=name), key) == value
    given = 7 if key == "dynamic_sampling_rounds" else value if isinstance(value, str) else 0.5
    assert getattr(AlgorithmSpec(name=name, **{key: given}), key) == given


def test_bounds_of_masks_are_those_of_the_correction():
    mis, icepop = AlgorithmSpec(correction="mis"), AlgorithmSpec(correction="icepop")
    assert (mis.correction_low, mis.correction_high) == (0.5, 2.0)
    assert (icepop.correction_low, icepop.correction_high) == (0.5, 5.0)


@pytest.mark.parametrize("correction", CORRECTION_OPTIONS)
def test_an_option_of_another_correction_is_refused_with_the_right_one(correction):
    values = {"correction_cap": 3.0, "correction_low": 0.4, "correction_high": 3.0, "geometric_tolerance": 0.1}
    for key in set(values) - set(CORRECTION_OPTIONS[correction]):
        message = refusal(correction=correction, **{key: values[key]})
        assert f"algorithm.{key} is not read with correction {correction}" in message
        assert next(name for name, options in CORRECTION_OPTIONS.items() if key in options) in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "dr_grpo"}, "rollout.max_new_tokens is usual"),
        ({"loss_length_tokens": 5}, "read with aggregation constant_length alone"),
        ({"name": "gspo", "aggregation": "token_mean"}, "sequence_mean by definition"),
        ({"name": "dapo", "overlong_limit_tokens": 20}, "need each other"),
        ({"name": "dapo", "overlong_limit_tokens": 20, "overlong_buffer_tokens": 30}, "must not exceed"),
        ({"name": "dapo", "overlong_limit_tokens": 65, "overlong_buffer_tokens": 5}, "never reached"),
        ({"name": "custom", "loss_function": "a:b", "clip_low": 0.1}, "with these options"),
        ({"name": "custom", "advantage_function": "a:b", "normalize_by_std": True}, "with these options"),
        ({"clip_low": 1.5}, "algorithm.clip_low"),
        ({"name": "ppo", "gamma": 1.1}, "algorithm.gamma"),
        ({"name": "grppo"}, "algorithm.name"),
        ({"clip_hihg": 0.3}, "unknown key 'algorithm.clip_hihg'; did you mean 'algorithm.clip_high'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(options, message):
    assert message in refusal(**options)


@pytest.mark.parametrize("name", ["rloo", "gspo", "reinforce_pp_baseline", "decoupled_ppo"])
def test_algorithms_that_compare_samples_need_more_than_one(name):
    one = tree(name=name)
    one["rollout"]["samples_per_prompt"] = 1
    with pytest.raises(SpecError, match="samples_per_prompt must be at least 2"):
        spec_from_tree(one, "spec.yaml")
    one["algorithm"]["name"] = "reinforce_pp"
    spec_from_tree(one, "spec.yaml")


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_what_reads_its_answers_from_data_needs_no_engines(name):
    assert not spec_from_tree(tree(name=name), "spec.yaml").uses_engines
    assert spec_from_tree(tree(), "spec.yaml").uses_engines


def test_needs_follow_the_options():
    def needs(**options):
        return algorithm_of(AlgorithmSpec(**options)).needs

    assert not any(vars(needs()).values())
    assert needs(kl_coef=0.1).reference
    assert needs(entropy_coef=0.1).entropy_gradient
    assert needs(correction="sequence_tis").sequences
    assert not needs(correction="token_tis").sequences
    assert needs(name="gspo").sequences
    assert needs(name="ppo").critic
    assert not needs(name="ppo").proximal
    assert needs(name="ppo", kl_coef=0.1, kl_in="reward").proximal
    assert needs(name="reward_model").scores


def test_the_generated_documentation_names_everything():
    text = algorithm_table.document()
    for name in (*ALGORITHMS, *CORRECTION_OPTIONS, *AlgorithmSpec.model_fields, "k3+"):
        assert name in text
    rows = [line for line in text.splitlines() if line.startswith("| `grpo`")]
    assert len(rows) == 2
    for section in text.split("## ")[1:]:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in section.splitlines() if line.startswith("|")}
        assert len(cells) == 1, section


def test_the_page_of_the_algorithms_has_what_is_generated():
    page = Path(slimerl.algorithms.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert algorithm_table.document() in page, "put what tools/algorithm_table.py prints into it"
