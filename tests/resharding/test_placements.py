"""The tables against an independent account of both layouts, and there and back, bit for bit."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_models import (
    assert_same,
    dense_configs,
    empty_parameters,
    engine_reference,
    filled,
    megatron_reference,
    moe_configs,
    random_state,
    same_bits,
)

from slimerl.resharding.assemble import collect, scatter
from slimerl.resharding.coverage import owned_placements
from slimerl.resharding.families import family_of
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames

EXAMPLES = settings(max_examples=120, deadline=None, derandomize=True)


@st.composite
def megatron_cases(draw: st.DrawFn) -> tuple[dict[str, Any], MegatronLayout]:
    tensor = draw(st.sampled_from([1, 2, 3, 4, 8]))
    config = draw(dense_configs(tensor=tensor))
    pipeline = draw(st.sampled_from([p for p in (1, 2, 4) if config["num_hidden_layers"] % p == 0]))
    virtual = 2 if pipeline == 2 and config["num_hidden_layers"] == 4 and draw(st.booleans()) else 1
    stage_layers = None
    if draw(st.booleans()):
        cuts = draw(
            st.lists(
                st.integers(0, config["num_hidden_layers"]),
                min_size=pipeline * virtual - 1,
                max_size=pipeline * virtual - 1,
            )
        )
        counts = [
            after - before for before, after in itertools.pairwise([0, *sorted(cuts), config["num_hidden_layers"]])
        ]
        stage_layers = tuple(tuple(counts[chunk * pipeline : (chunk + 1) * pipeline]) for chunk in range(virtual))
    return config, MegatronLayout(
        tensor=tensor,
        data=draw(st.sampled_from([1, 2])),
        context=draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        virtual=virtual,
        stage_layers=stage_layers,
        vocabulary_multiple=draw(st.sampled_from([1, 8])),
    )


@st.composite
def moe_cases(draw: st.DrawFn) -> tuple[dict[str, Any], MegatronLayout]:
    tensor, data = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (2, 4)]))
    expert_tensor = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % size == 0]))
    expert = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % (size * expert_tensor) == 0]))
    config = draw(moe_configs(tensor=tensor, expert_tensor=expert_tensor, expert=expert))
    return config, MegatronLayout(tensor=tensor, data=data, expert=expert, expert_tensor=expert_tensor)


@EXAMPLES
@given(st.one_of(megatron_cases(), moe_cases()))
def test_w10_checkpoint_to_megatron_and_back_is_bit_exact_with_equal_keys(case):
    config, layout = case
    family, state = family_of(config), random_state(config)
    ranks = [family.megatron_placements(config, layout, rank) for rank in range(layout.world_size)]
    back = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
    for placements, owned in zip(ranks, owned_placements(ranks, family.logical_tensors(config)), strict=True):
        collect(owned, filled(placements, state), back)
    assert_same(back, state)


@EXAMPLES
@given(st.one_of(megatron_cases(), moe_cases()))
def test_w9_megatron_shards_are_what_megatron_holds(case):
    config, layout = case
    layout = replace(layout, pipeline=1, virtual=1, stage_layers=None)
    state = random_state(config)
    for rank in range(layout.world_size):
        placements = family_of(config).megatron_placements(config, layout, rank)
        assert_same(filled(placements, state), megatron_reference(config, state, layout, rank))


@EXAMPLES
@given(st.data())
def test_engine_shards_are_what_sglang_holds(data):
    size = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    config = data.draw(dense_configs(engine=size))
    state = random_state(config)
    for rank in range(size):
        placements = family_of(config).engine_placements(config, EngineLayout(tensor=size), rank)
        assert_same(filled(placements, state), engine_reference(config, state, size, rank))


@EXAMPLES
@given(st.data())
def test_engine_shards_of_experts_are_what_sglang_holds(data):
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    expert = data.draw(st.sampled_from([groups for groups in (1, 2, 4, 8) if size % groups == 0]))
    config = data.draw(moe_configs(tensor=size, expert_tensor=size // expert, expert=expert))
    state = random_state(config)
    for rank in range(size):
        placements = family_of(config).engine_placements(config, EngineLayout(tensor=size, expert=expert), rank)
        assert_same(filled(placements, state), engine_reference(config, state, size, rank, expert))


@EXAMPLES
@given(st.data())
def test_megatron_shards_become_engine_shards_at_any_pair_of_sizes(data):
    tensor, engine = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4]))
    config = data.draw(dense_configs(tensor=tensor, engine=engine))
    family, state, layout = family_of(config), random_state(config), MegatronLayout(tensor=tensor)
    gathered = {name: torch.zeros_like(value) for name, value in state.items()}
    for rank in range(tensor):
        placements = family.megatron_placements(config, layout, rank)
        collect(placements, filled(placements, state), gathered)
    for rank in range(engine):
        placements = family.engine_placements(config, EngineLayout(tensor=engine), rank)
        assert_same(filled(placements, gathered), engine_reference(config, state, engine, rank))


def test_uneven_pipeline_places_each_layer_on_its_stage():
    config = small_config(num_hidden_layers=5)
    layout = MegatronLayout(pipeline=3, stage_layers=((1, 3, 1),))
    held = [
        {
            placement.parameter: placement.tensor
            for placement in family_of(config).megatron_placements(config, layout, rank)
            if "linear_fc2" in placement.parameter
        }
        for rank in range(3)
    ]
    down = "model.layers.{}.mlp.down_proj.weight"
    fc2 = "decoder.layers.{}.mlp.linear_fc2.weight"
    assert held == [
        {fc2.format(0): down.format(0)},
        {fc2.format(0): down.format(1), fc2.format(1): down.format(2), fc2.format(2): down.format(3)},
        {fc2.format(0): down.format(4)},
    ]


def test_w8_every_logical_element_has_one_owner_though_norms_and_tied_embeddings_have_many_holders():
    """Fault: the copy of a tied embedding on the last pipeline stage is taken as a second tensor, or as none."""
    config = small_config(tie_word_embeddings=True)
    layout = MegatronLayout(tensor=2, data=2, pipeline=2)
    family = family_of(config)
    ranks = [family.megatron_placements(config, layout, rank) for rank in range(layout.world_size)]
    assert any(placement.parameter == "output_layer.weight" for placement in ranks[-1])
    owned = owned_placements(ranks, family.logical_tensors(config))
    owners = [rank for rank, mine in enumerate(owned) if any(p.tensor == "model.embed_tokens.weight" for p in mine)]
    assert owners == [0, 1]
    assert not any(owned[2] + owned[3] + owned[6] + owned[7]), "data-parallel replicas own nothing"
    norm_owners = [rank for rank, mine in enumerate(owned) if any(p.tensor == "model.norm.weight" for p in mine)]
    assert norm_owners == [4]


def test_w8_kv_heads_are_shared_by_neighbouring_engine_ranks_where_there_are_fewer_than_ranks():
    config = small_config(num_key_value_heads=2)
    starts = [
        placement.box.starts[0] // config["head_dim"]
        for rank in range(4)
        for placement in family_of(config).engine_placements(config, EngineLayout(tensor=4), rank)
        if placement.tensor == "model.layers.0.self_attn.k_proj.weight"
    ]
    assert starts == [0, 0, 1, 1]


def small_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "qwen3",
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def test_transformer_engine_names_differ_only_where_norms_are_fused_into_the_linear_after_them():
    config = small_config()
    names = [
        {p.parameter for p in family_of(config).megatron_placements(config, MegatronLayout(names=kind), 0)}
        for kind in ("local", "transformer_engine")
    ]
    assert {name for name in names[1] - names[0] if ".0." in name} == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }


def test_transformer_engine_groups_experts_and_keeps_the_norm_before_them():
    config = small_config(model_type="qwen3_moe", num_experts=2, moe_intermediate_size=4, num_hidden_layers=1)
    layout = MegatronLayout(names=ModuleNames.TRANSFORMER_ENGINE)
    names = {placement.parameter for placement in family_of(config).megatron_placements(config, layout, 0)}
    assert {name for name in names if "mlp" in name} == {
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        *(f"decoder.layers.0.mlp.experts.linear_fc{number}.weight{expert}" for number in (1, 2) for expert in (0, 1)),
    }


def test_a_dtype_is_converted_only_where_that_is_asked_for():
    config = small_config(dtype="bfloat16")
    family, state = family_of(config), random_state(config)
    placements = family.megatron_placements(config, MegatronLayout(), 0)
    parameters = empty_parameters(placements, dict.fromkeys(state, torch.float32))
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*cast=True"):
        scatter(placements, state, parameters)
    scatter(placements, state, parameters, cast=True)
    norm = state["model.norm.weight"].float()
    assert same_bits(parameters["decoder.final_layernorm.weight"], norm)
