"""`engine.elastic` is refused where engines could not come and go, or never would."""

import pytest

from slimerl.spec.load import SpecError, spec_from_tree


def tree(elastic, replicas=2, **sections):
    made = {
        "name": "e",
        "model": {"path": "model"},
        "data": {"train_path": "data.jsonl"},
        "training": {"steps": 100, "prompts_per_step": 8},
        "engine": {"replicas": replicas, "tensor_parallel": 2, "elastic": elastic},
        "cluster": {"placement": "disaggregated"},
    }
    for section, values in sections.items():
        made[section] = {**made.get(section, {}), **values}
    return made


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (tree({"min": 3, "max": 3}, 3), r"min = 3 and .*max = 3 leave nothing to change; raise max"),
        (tree({"max": 4}, 5), r"engine\.replicas = 5, which is not within engine\.elastic\.min = 1 and .*max = 4"),
        (tree({"min": 3, "max": 4}), r"engine\.replicas = 2, which is not within engine\.elastic\.min = 3"),
        (tree({"max": 4}, cluster={"placement": "colocated"}), r"Set cluster\.placement: disaggregated"),
        (tree({"max": 4}, algorithm={"name": "sft"}), r"sft reads its responses from the data and has no engines"),
        (tree({"max": 4}, training={"steps": 10}), r"cooldown_steps = 5: in training\.steps = 10 .* it takes 11"),
        (tree({"max": 4, "trainer_idle": 1.5}), r"engine\.elastic\.trainer_idle"),
        (tree({"max": 4, "engines_idle": 0.0}), r"engine\.elastic\.engines_idle"),
        (tree({"min": 1}), r"'engine\.elastic\.max' is missing"),
        (tree({"max": 4, "cooldown": 5}), r"unknown key 'engine\.elastic\.cooldown'; did you mean .*cooldown_steps"),
    ],
)
def test_what_could_not_change_the_engines_is_refused_with_what_to_set(given, told):
    with pytest.raises(SpecError, match=told):
        spec_from_tree(given, "test")


def test_gpus_are_there_for_as_many_engines_as_may_run_at_once():
    spec = spec_from_tree(tree({"max": 4}), "test")
    assert (spec.engine.most_replicas, spec.engine_gpus, spec.gpus) == (4, 8, 9)
    without = spec_from_tree(tree(None), "test")
    assert (without.engine.most_replicas, without.engine_gpus, without.gpus) == (2, 4, 5)


def test_the_shortest_run_that_could_change_something_is_taken():
    assert spec_from_tree(tree({"max": 4}, training={"steps": 11}), "test").engine.elastic.max == 4
