"""Held-out sets in a spec: what is not set is as in `evaluation`, and what cannot be told is refused."""

import pytest

from slimerl.conductor.preflight.data import data_faults
from slimerl.spec.evaluation_engines import evaluation_engines
from slimerl.spec.load import SpecError, spec_from_tree
from slimerl.spec.schema import RunSpec

SET = {"name": "aime", "path": "aime.jsonl", "samples_per_prompt": 8, "temperature": 0.6, "pass_at": [1, 8]}


def spec_of(evaluation: dict, **sections: dict) -> RunSpec:
    tree = {
        "name": "run",
        "model": {"path": "model"},
        "data": {"train_path": "train.jsonl"},
        "training": {"steps": 2, "prompts_per_step": 8},
        "evaluation": evaluation,
    }
    return spec_from_tree(tree | sections, "spec")


def test_a_set_takes_from_the_section_what_it_does_not_set():
    spec = spec_of({"sets": [SET, {"name": "plain", "path": "p.jsonl"}], "max_new_tokens": 32, "temperature": 0.1})
    aime, plain = spec.evaluation.sets
    assert [spec.evaluation.temperature_of(one) for one in (aime, plain)] == [0.6, 0.1]
    assert spec.evaluation.new_tokens_of(plain, 256) == 32
    assert spec.evaluates
    assert spec.input_paths["evaluation.sets.0.path"].name == "aime.jsonl"


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sets": [SET | {"pass_at": [16]}]}, r"pass_at = \[16\] of set 'aime' asks for more answers than .* = 8"),
        ({"sets": [SET | {"majority_at": [9]}]}, "raise that, or lower majority_at"),
        ({"sets": [SET | {"temperature": 0.0}]}, "all 8 answers of set 'aime' to a prompt would be the same"),
        ({"sets": [SET, SET]}, "two sets of evaluation.sets are called 'aime'"),
        ({"sets": [SET | {"pth": "x"}]}, "unknown key 'evaluation.sets.0.pth'; did you mean 'evaluation.sets.path'"),
        ({"sets": [SET | {"max_new_tokens": 4000}]}, r"max_new_tokens .* = 5024 exceeds engine.context_tokens"),
        ({"background": True}, "there is nothing to evaluate; set data.eval_path or evaluation.sets"),
        ({"background": True, "sets": [SET]}, "set cluster.placement: disaggregated, or drop it"),
    ],
)
def test_what_cannot_be_told_is_refused(evaluation, message):
    with pytest.raises(SpecError, match=message):
        spec_of(evaluation)


def test_an_evaluation_in_the_background_has_a_step_at_which_it_is_made():
    beside = {"cluster": {"placement": "disaggregated"}}
    assert spec_of({"background": True, "every_steps": 1, "sets": [SET]}, **beside).evaluation.background
    with pytest.raises(SpecError, match=r"evaluation\.every_steps = 0 evaluates at no other; set that, or drop"):
        spec_of({"background": True, "sets": [SET]}, **beside)


APART = {"background": True, "every_steps": 1, "sets": [SET], "engines": 2}
BESIDE = {"cluster": {"placement": "disaggregated"}, "engine": {"replicas": 4}}


def test_the_last_engines_are_those_that_evaluate_alone():
    assert list(evaluation_engines(spec_of(APART, **BESIDE))) == [2, 3]
    assert list(evaluation_engines(spec_of({}))) == []


@pytest.mark.parametrize(
    ("evaluation", "sections", "message"),
    [
        ({"background": False}, {}, "set evaluation.background: true, or drop evaluation.engines"),
        ({"every_steps": 0}, {}, "evaluates at no other; set that, or drop it"),
        ({}, {"engine": {"replicas": 2}}, "leaves no engine for rollouts; raise engine.replicas to 3, or lower"),
        ({}, {"cluster": {"placement": "colocated"}}, "set cluster.placement: disaggregated"),
        ({}, {"rollout": {"processes": 2}}, "belong to one rollout process; set rollout.processes: 1"),
        (
            {},
            {"engine": {"replicas": 4, "elastic": {"max": 5, "cooldown_steps": 1}}, "training": {"steps": 9}},
            "come and go by load are all of the rollouts; drop engine.elastic",
        ),
        ({}, {"sync": {"transport": "shards"}}, "set another transport, or drop evaluation.engines"),
        ({}, {"agent": {"kind": "external"}}, "samples through the gateway, on the engines of the rollouts; drop"),
    ],
)
def test_engines_that_cannot_evaluate_alone_are_refused_with_what_to_set(evaluation, sections, message):
    training = {"prompts_per_step": 8, "steps": 2, **sections.get("training", {})}
    with pytest.raises(SpecError, match=message):
        spec_of(APART | evaluation, **{**BESIDE, **sections, "training": training})


@pytest.mark.parametrize(("every_steps", "due"), [(0, [0, 7]), (3, [0, 3, 6, 7])])
def test_the_first_and_the_last_weights_are_evaluated_and_those_between_as_often_as_is_said(every_steps, due):
    evaluation = spec_of({"every_steps": every_steps, "sets": [SET]}).evaluation
    assert [step for step in range(8) if evaluation.is_due(step, steps=7)] == due


def test_majorities_need_a_reward_that_tells_answers():
    voting = {"sets": [SET | {"majority_at": [8]}]}
    assert spec_of(voting, reward={"kind": "math"}).evaluation.sets[0].majority_at == (8,)
    with pytest.raises(SpecError, match="this reward does not tell: use"):
        spec_of(voting, reward={"kind": "http", "url": "http://127.0.0.1:1/score"})


def test_sets_are_answered_by_engines():
    with pytest.raises(SpecError, match="this algorithm has none; name one file"):
        spec_of({"sets": [SET]}, algorithm={"name": "sft"})


def test_a_set_whose_file_is_not_there_is_refused_before_the_start(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": "a", "prompt": "1=", "answer": "1"}\n')
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "prompt": "1="}\n')
    sets = [SET | {"path": str(tmp_path / "none.jsonl")}, SET | {"name": "b", "path": str(tmp_path / "bad.jsonl")}]
    spec = spec_of({"sets": sets}, data={"train_path": str(tmp_path / "train.jsonl")})
    missing, bad = data_faults(spec, None)
    assert missing.startswith(f"evaluation.sets.0.path: {tmp_path / 'none.jsonl'} does not exist")
    assert bad.endswith("bad.jsonl:1: 'answer' is missing")
