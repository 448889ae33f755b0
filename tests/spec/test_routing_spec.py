"""`algorithm.routing_replay` is refused where nothing would be replayed, or not what was chosen."""

import pytest

from slimerl.engine.launcher import Device, server_arguments
from slimerl.spec.load import SpecError, spec_from_tree
from slimerl.training.needs import unroutable


def tree(replay, algorithm=(), **sections):
    made = {
        "name": "r",
        "model": {"path": "model"},
        "data": {"train_path": "data.jsonl"},
        "algorithm": {"routing_replay": replay, **dict(algorithm)},
        "training": {"steps": 1, "prompts_per_step": 8},
    }
    for section, values in sections.items():
        made[section] = {**made.get(section, {}), **values}
    return made


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (tree("r2"), r"minibatches_per_step = 1 .* raise it, or choose r3"),
        (tree("r3", rollout={"max_staleness": 1}), r"set rollout\.on_update: abort"),
        (tree("r3", rollout={"max_staleness": 1, "on_update": "abort"}), "placement: disaggregated"),
        (tree("r3", rollout={"speculation": {"tier": "exact"}}), r"speculation\.tier: off"),
        (tree("r3", engine={"extra_args": ["--enable-hierarchical-cache"]}), "remove --enable-hierarchical-cache"),
        (tree("r3", engine={"drafting": {"method": "mtp"}}), r"drop engine\.drafting"),
        (tree("r3", agent={"kind": "external"}), "agent.kind external"),
        (tree("r3", {"name": "sft"}), "routing_replay is not read by sft"),
        (tree("r4"), "routing_replay"),
    ],
)
def test_what_would_not_be_replayed_is_refused_with_what_to_set(given, told):
    with pytest.raises(SpecError, match=told):
        spec_from_tree(given, "test")


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "decoupled_ppo", "rloo"])
def test_every_algorithm_that_samples_takes_it(name):
    apart = {"rollout": {"max_staleness": 2, "on_update": "abort"}, "cluster": {"placement": "disaggregated"}}
    spec = spec_from_tree(tree("r3", {"name": name}, **apart), "test")
    assert spec.algorithm.routing_replay == "r3"


@pytest.mark.parametrize(("replay", "asked"), [("none", False), ("r2", False), ("r3", True)])
def test_engines_record_their_routing_where_it_is_replayed(replay, asked):
    spec = spec_from_tree(tree(replay, training={"minibatches_per_step": 2}), "test")
    arguments = server_arguments(spec, 0, Device.CUDA, 1)
    assert ("--enable-return-routed-experts" in arguments) == asked


def test_a_dense_model_has_no_routing_to_replay():
    class Dense:
        sparse_layers = ()

    for replay, refused in (("none", False), ("r3", True)):
        algorithm = spec_from_tree(tree(replay), "test").algorithm
        found = unroutable(algorithm, Dense())
        assert bool(found) == refused
        assert not refused or "has no experts; drop the key" in found[0]
