"""`rollout.speculation` and `engine.drafting`: what goes together, and what the refusals say."""

from pathlib import Path
from typing import Any

import pytest

from slimerl.spec import RunSpec, SpecError, load_spec
from slimerl.spec.load import spec_from_tree


def spec(speculation: dict[str, Any] | None = None, drafting: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
    rollout = {"speculation": speculation or {}, **sections.pop("rollout", {})}
    tree = {
        "name": "test",
        "model": {"path": "model"},
        "data": {"train_path": "train.jsonl"},
        "training": {"steps": 1, "prompts_per_step": 8},
        "rollout": rollout,
        "engine": {"drafting": drafting},
        **sections,
    }
    return spec_from_tree(tree, "spec")


def refusal(*args: Any, **sections: Any) -> str:
    with pytest.raises(SpecError) as refused:
        spec(*args, **sections)
    return str(refused.value)


def test_speculation_is_off_unless_asked_for():
    assert not spec().rollout.speculation.is_on
    assert spec().engine.drafting is None


def test_off_is_off_as_yaml_reads_it_too(tmp_path: Path):
    file = tmp_path / "spec.yaml"
    file.write_text(
        "name: n\nmodel: {path: m}\ndata: {train_path: t.jsonl}\ntraining: {steps: 1, prompts_per_step: 8}\n"
        "rollout: {speculation: {tier: off}}\n"
    )
    assert load_spec(file, ["rollout.speculation.tier=off"]).rollout.speculation.tier == "off"
    assert load_spec(file, []).rollout.speculation.tier == "off"


@pytest.mark.parametrize("tier", ["exact", "lenient", "coupled"])
def test_drafts_are_scored_at_temperature_one_and_every_tier_refuses_others(tier: str):
    said = refusal({"tier": tier}, rollout={"temperature": 0.7})
    assert "needs rollout.temperature 1.0, not 0.7" in said
    assert spec({"tier": tier}).rollout.speculation.is_on
    assert spec(rollout={"temperature": 0.7}).rollout.temperature == 0.7


def test_tier_lenient_wants_the_trainers_own_log_probabilities():
    said = refusal({"tier": "lenient"}, algorithm={"name": "grpo", "proximal": "behavior"})
    assert "algorithm.proximal must be trainer" in said
    assert spec({"tier": "exact"}, algorithm={"name": "grpo", "proximal": "behavior"})


@pytest.mark.parametrize(("algorithm", "lenience"), [("grpo", 0.5), ("ppo", 0.3), ("dapo", 0.15), ("rloo", 0.5)])
def test_lenience_is_the_published_one_of_the_algorithm_unless_it_is_given(algorithm: str, lenience: float):
    assert spec({"tier": "lenient"}).rollout.speculation.lenience(algorithm) == lenience
    assert spec({"tier": "lenient", "log_lenience": 0}).rollout.speculation.lenience(algorithm) == 0


def test_what_a_tier_does_not_read_is_refused():
    assert "log_lenience is read by tier lenient alone" in refusal({"tier": "exact", "log_lenience": 0.5})
    assert "siblings is not read by tier lenient" in refusal({"tier": "lenient", "siblings": False})


def test_responses_from_the_data_are_not_drafted():
    assert "sft takes its responses from the data" in refusal({"tier": "exact"}, algorithm={"name": "sft"})


def test_each_method_has_its_draft_model_where_it_belongs():
    assert "is the model's own layer" in refusal(drafting={"method": "mtp", "frozen": True, "model_path": "draft"})
    assert "needs its draft model in engine.drafting.model_path" in refusal(
        drafting={"method": "eagle", "frozen": True}
    )
    assert spec(drafting={"method": "eagle3", "frozen": True, "model_path": "draft"})


def test_more_draft_tokens_than_there_are_branches_for_are_refused():
    said = refusal(drafting={"method": "mtp", "frozen": True, "steps": 1, "draft_tokens": 4})
    assert "raise engine.drafting.steps" in said


def test_an_engine_does_not_draft_twice():
    assert "both draft" in refusal({"tier": "exact"}, drafting={"method": "mtp", "frozen": True})


@pytest.mark.parametrize("speculation", [{}, {"tier": "lenient"}, {"tier": "exact", "siblings": False}])
def test_the_written_spec_loads_to_an_equal_one(speculation: dict[str, Any]):
    made = spec(speculation, drafting=None if speculation else {"method": "mtp", "frozen": True})
    assert spec_from_tree(made.model_dump(mode="json"), "again") == made
