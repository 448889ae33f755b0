"""GLM-4.5, DeepSeek-V3 and Kimi-K2: the tables against an independent account, and there and back, bit for bit."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_models import assert_same, filled, random_state
from sparse_models import BLOCK, DEEPSEEK, GLM, KIMI, PUBLISHED, MegatronReference, SglangReference, sparse_configs

from slimerl.resharding.assemble import collect
from slimerl.resharding.coverage import owned_placements
from slimerl.resharding.families import BlockScales, ConfigError, Form, family_of
from slimerl.resharding.families.table import DRAFT
from slimerl.resharding.layouts import EngineLayout, ExpertLocation, LayoutError, MegatronLayout

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
WITH_PREDICTION = Form(prediction=True)
SIZES = (1, 2, 4)


@st.composite
def megatron_cases(draw: st.DrawFn) -> tuple[dict[str, Any], MegatronLayout]:
    tensor, data = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (2, 4)]))
    expert_tensor = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % size == 0]))
    expert = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % (size * expert_tensor) == 0]))
    config = draw(sparse_configs(ranks=max(tensor, expert_tensor), expert=expert))
    return config, MegatronLayout(
        tensor=tensor,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        vocabulary_multiple=draw(st.sampled_from([1, 8])),
        split_latent=draw(st.booleans()),
    )


@EXAMPLES
@given(megatron_cases())
def test_megatron_shards_are_what_megatron_holds(case):
    config, layout = case
    state = random_state(config, WITH_PREDICTION)
    for rank in range(layout.world_size):
        placements = family_of(config).megatron_placements(config, layout, rank, WITH_PREDICTION)
        assert_same(filled(placements, state), MegatronReference(config, state, layout, rank).found)


@st.composite
def engine_layouts(draw: st.DrawFn) -> EngineLayout:
    tensor = draw(st.sampled_from(SIZES))
    sizes = [size for size in SIZES if tensor % size == 0]
    return EngineLayout(
        tensor=tensor,
        expert=draw(st.sampled_from(sizes)),
        data_attention=draw(st.sampled_from(sizes)),
        head_over_attention=draw(st.booleans()),
        replicated_dense=draw(st.booleans()),
        replicated_shared=draw(st.booleans()),
        up_first=draw(st.booleans()),
    )


def assert_engine_shards(config: dict[str, Any], layout: EngineLayout, form: Form) -> None:
    family, state = family_of(config), random_state(config, form)
    ranks = [family.engine_placements(config, layout, rank, form) for rank in range(layout.world_size)]
    back = {name: tensor.clone().zero_() for name, tensor in state.items()}
    owned = owned_placements(ranks, family.logical_tensors(config, form=form))
    for rank, placements in enumerate(ranks):
        parameters = filled(placements, state)
        assert_same(parameters, SglangReference(config, state, layout, rank).found)
        collect(owned[rank], parameters, back)
    assert_same(back, state)


@EXAMPLES
@given(st.data())
def test_engine_shards_are_what_sglang_holds(data):
    layout = data.draw(engine_layouts())
    form = Form(prediction=data.draw(st.booleans()))
    assert_engine_shards(data.draw(sparse_configs(ranks=layout.tensor, expert=layout.expert)), layout, form)


@EXAMPLES
@given(st.data())
def test_p3_fp8_data_and_scales_are_what_sglang_holds(data):
    layout = data.draw(engine_layouts())
    form = Form(prediction=data.draw(st.booleans()), scales=BlockScales(BLOCK))
    config = data.draw(sparse_configs(ranks=layout.tensor, expert=layout.expert, whole_blocks=True))
    assert_engine_shards(config, layout, form)


@pytest.mark.parametrize("scales", [None, BlockScales(BLOCK)], ids=["plain", "fp8"])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("config", [DEEPSEEK, GLM], ids=lambda config: config["model_type"])
def test_a_fused_shared_expert_lies_behind_the_routed_ones_of_every_rank(config, tensor, expert, scales):
    layout = EngineLayout(tensor=tensor, expert=expert, fused_shared_experts=True)
    assert_engine_shards(config, layout, Form(prediction=True, scales=scales))


def test_w8_the_copy_of_the_embedding_beside_the_prediction_layer_is_owned_by_the_first_stage():
    layout = MegatronLayout(tensor=2, pipeline=2)
    family = family_of(DEEPSEEK)
    ranks = [family.megatron_placements(DEEPSEEK, layout, rank, WITH_PREDICTION) for rank in range(4)]
    name = "embedding.word_embeddings.weight"
    holders = [rank for rank, placements in enumerate(ranks) if any(p.parameter == name for p in placements)]
    assert holders == [0, 1, 2, 3]
    owned = owned_placements(ranks, family.logical_tensors(DEEPSEEK, form=WITH_PREDICTION))
    assert [any(p.parameter == name for p in mine) for mine in owned] == [True, True, False, False]
    without = [family.megatron_placements(DEEPSEEK, layout, rank) for rank in range(4)]
    assert not any("mtp" in p.parameter for placements in without for p in placements)
    assert not any(p.parameter == name for p in without[2])


def test_the_draft_model_has_the_parameters_of_sglangs_nextn_but_for_those_that_it_shares():
    placements = family_of(DEEPSEEK).engine_placements(DEEPSEEK, EngineLayout(), 0, WITH_PREDICTION)
    names = {p.parameter.removeprefix(DRAFT) for p in placements if p.parameter.startswith(DRAFT)}
    decoder = {name for name in names if name.startswith("model.decoder.")}
    own = {f"model.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")}
    assert names - decoder == own
    layer = {p.parameter for p in placements if p.parameter.startswith("model.layers.3.")}
    assert decoder == {name.replace("layers.3", "decoder") for name in layer}


def test_redundant_experts_are_refused_for_a_draft_model():
    """SGLang allocates them in the draft, and loads them never: nothing could say what they hold."""
    layout = EngineLayout(tensor=4, expert=4, redundant_experts=4)
    with pytest.raises(LayoutError, match="draft"):
        family_of(DEEPSEEK).engine_placements(DEEPSEEK, layout, 0, WITH_PREDICTION)
    with pytest.raises(LayoutError, match="redundant"):
        family_of(GLM).engine_placements(GLM, layout, 0)


def test_experts_lie_where_the_engines_map_says_and_those_of_the_draft_in_order():
    shift = tuple(tuple((place + layer) % 8 for place in range(8)) for layer in range(4))
    assert_engine_shards(DEEPSEEK, EngineLayout(tensor=4, expert=2, expert_map=shift), WITH_PREDICTION)


@pytest.mark.parametrize(
    ("config", "billions"),
    [("deepseek_v3_671b", 671.03), ("kimi_k2_1t", 1026.41), ("glm45_355b", 352.80), ("qwen3_235b_a22b", 235.09)],
)
def test_published_models_have_their_published_number_of_parameters(config, billions):
    tensors = family_of(PUBLISHED[config]).logical_tensors(PUBLISHED[config])
    assert round(sum(tensor.numel for tensor in tensors) / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank must be a positive integer"),
        (DEEPSEEK, {"n_routed_experts": 0}, "n_routed_experts must be a positive integer"),
        (DEEPSEEK, {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported for deepseek_v3"),
        (KIMI, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported for kimi_k2"),
        (KIMI, {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported for kimi_k2"),
        (GLM, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ],
)
def test_a_config_that_the_table_does_not_have_is_refused_by_its_key(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        family_of(config).table(config | changes)


def test_a_config_must_say_whether_queries_have_a_latent():
    config = {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"}
    with pytest.raises(ConfigError, match="q_lora_rank must be given"):
        family_of(config).table(config)


def test_redundant_experts_hold_a_second_copy_of_the_first():
    layout = EngineLayout(tensor=4, expert=4, redundant_experts=4)
    assert_engine_shards(DEEPSEEK, layout, Form())
    slots = [layout.expert_slots(rank, 8, ExpertLocation.COPIED, 0) for rank in range(4)]
    assert slots == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
