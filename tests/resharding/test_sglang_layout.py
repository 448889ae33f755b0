"""Physical layouts of SGLang: its own models, on every rank of every kind of engine, hold after its own loaders ran
what the tables place, byte for byte. Without an engine: `sglang_models.py`."""

from typing import Any

import pytest
import sglang_models
from sparse_models import DEEPSEEK, GLM, KIMI

from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.families.family import PLAIN
from slimerl.resharding.layouts import EngineLayout, LayoutError

DENSE: dict[str, Any] = {
    "vocab_size": 75,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"model_type": "llama"},
    "llama, tied": DENSE | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": DENSE | {"model_type": "qwen2"},
    "qwen3": DENSE | {"model_type": "qwen3"},
    "qwen3, tied": DENSE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16},
    "glm4_moe": GLM,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, no query latent": DEEPSEEK | {"q_lora_rank": None},
    "kimi_k2": KIMI,
}
CONFIGS = {name: config | {"dtype": "bfloat16"} for name, config in CONFIGS.items()}
SPARSE = [name for name, config in CONFIGS.items() if "moe_intermediate_size" in config]
LATENT = [name for name, config in CONFIGS.items() if "kv_lora_rank" in config]
ALL_ALIKE = [EngineLayout(), EngineLayout(2), EngineLayout(4), EngineLayout(8)]
"""With 2 KV heads, ranks of the last two share them; 75 rows are padded to 128."""
EXPERTS = [
    EngineLayout(4, expert=2),
    EngineLayout(4, expert=4),
    EngineLayout(4, expert=4, data_attention=2),
    EngineLayout(4, expert=2, data_attention=4, head_over_attention=True),
    EngineLayout(2, expert=2, up_first=True),
]
PREDICTION = Form(prediction=True)


@pytest.fixture
def differences(sglang_process):
    return lambda config, layout, form=PLAIN: sglang_process(sglang_models.differences, config, layout, form)


@pytest.mark.parametrize("layout", ALL_ALIKE, ids=lambda layout: f"tp{layout.tensor}")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_of_a_tensor_parallel_engine_holds_what_its_loader_puts_there(differences, name, layout):
    assert differences(CONFIGS[name], layout) == {}


@pytest.mark.parametrize("layout", EXPERTS, ids=str)
@pytest.mark.parametrize("name", SPARSE)
def test_experts_embedding_and_head_lie_where_expert_parallelism_and_dp_attention_put_them(differences, name, layout):
    assert differences(CONFIGS[name], layout) == {}


def moved(config, places):
    """An expert map: in each layer other experts in other places, some of them twice where there is room."""
    return tuple(
        tuple((3 * place + layer) % 8 for place in range(places)) for layer in range(config["num_hidden_layers"])
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_lie_where_the_engines_map_says_layer_by_layer(differences, name):
    config = CONFIGS[name]
    assert differences(config, EngineLayout(4, expert=2, expert_map=moved(config, 8))) == {}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_redundant_experts_are_second_copies_of_those_that_the_map_names(differences, name):
    config = CONFIGS[name]
    assert differences(config, EngineLayout(4, expert=4, redundant_experts=8)) == {}
    assert differences(config, EngineLayout(4, expert=4, redundant_experts=8, expert_map=moved(config, 16))) == {}


@pytest.mark.parametrize("name", LATENT)
def test_dense_layers_and_shared_experts_of_deepseek_are_whole_on_every_rank_where_asked_for(differences, name):
    for dense, shared in ((True, False), (False, True), (True, True)):
        layout = EngineLayout(4, expert=4, data_attention=4, replicated_dense=dense, replicated_shared=shared)
        assert differences(CONFIGS[name], layout) == {}


def test_shared_experts_of_glm_stay_cut_whatever_the_variable_for_deepseek_says(differences):
    found = differences(CONFIGS["glm4_moe"], EngineLayout(2, replicated_shared=True))
    assert {line.split(":")[0].rsplit(".", 2)[1] for line in found["rank 0"]} == {"gate_up_proj", "down_proj"}
    assert all(".shared_experts." in line for line in found["rank 0"])


@pytest.mark.parametrize("layout", [EngineLayout(), EngineLayout(4, expert=2)], ids=str)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_fused_shared_expert_is_one_more_slice_behind_the_routed_ones(differences, name, layout):
    fused = EngineLayout(layout.tensor, layout.expert, fused_shared_experts=True)
    assert differences(CONFIGS[name], fused) == {}


@pytest.mark.parametrize("layout", [EngineLayout(), EngineLayout(4, expert=2, data_attention=2)], ids=str)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_the_draft_model_has_its_own_decoder_and_norms_and_shares_embedding_and_head(differences, name, layout):
    assert differences(CONFIGS[name], layout, PREDICTION) == {}


PIPELINED = ["qwen2", "qwen3", "deepseek_v3", "kimi_k2"]


@pytest.mark.parametrize("name", PIPELINED)
def test_a_pipeline_has_its_odd_layers_last_and_the_head_on_the_last_stage(differences, name):
    for stages in (2, 3):
        assert differences(CONFIGS[name], EngineLayout(2, pipeline=stages)) == {}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(PIPELINED) - {"deepseek_v3, no query latent"}))
def test_pipelines_of_models_that_place_the_head_in_their_own_way_are_refused(name):
    with pytest.raises(LayoutError, match=r"pipeline = 2 is not planned: .*; set it to 1"):
        family_of(CONFIGS[name]).engine_placements(CONFIGS[name], EngineLayout(2, pipeline=2), 0)


def test_a_pipeline_with_a_draft_model_is_refused():
    with pytest.raises(LayoutError, match=r"pipeline = 2 is not planned: the draft model"):
        family_of(DEEPSEEK).engine_placements(DEEPSEEK, EngineLayout(2, pipeline=2), 0, PREDICTION)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_ranks_that_share_a_sequence_hold_the_same_part_of_attention(differences, name):
    assert differences(CONFIGS[name], EngineLayout(4, context_attention=2)) == {}
    if name in SPARSE:
        layout = EngineLayout(4, expert=2, data_expert=2, context_attention=2)
        assert differences(CONFIGS[name], layout) == {}
        assert differences(CONFIGS[name], EngineLayout(8, expert=2, data_attention=2, context_attention=2)) == {}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_models_that_cut_attention_over_those_ranks_all_the_same_are_refused(name):
    with pytest.raises(LayoutError, match="context_attention = 2 is not planned"):
        family_of(CONFIGS[name]).engine_placements(CONFIGS[name], EngineLayout(4, context_attention=2), 0)


LARGE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 75,
    "num_hidden_layers": 2,
    "dtype": "bfloat16",
}
WIDE = {"head_dim": 128, "num_key_value_heads": 2}
LATENT_SIZES = {
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
}
QUANTISED = {
    "qwen3": CONFIGS["qwen3"] | LARGE | WIDE,
    "qwen3_moe": CONFIGS["qwen3_moe"] | LARGE | WIDE,
    "glm4_moe": GLM | LARGE | WIDE,
    "deepseek_v3": DEEPSEEK | LARGE | LATENT_SIZES,
}
"""Whole blocks of 128 on two ranks, but for the latent of keys and values, which no rank cuts."""
SCALES = BlockScales(128)


@pytest.mark.parametrize("layout", [EngineLayout(), EngineLayout(2), EngineLayout(2, expert=2)], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_fp8_data_and_scales_lie_where_sglang_loads_them(differences, name, layout):
    if layout.expert > 1 and name not in SPARSE:
        return
    form = Form(prediction=name == "deepseek_v3", scales=SCALES)
    assert differences(QUANTISED[name], layout, form) == {}


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_no_weight_is_a_scale_of_the_cache_or_a_table_of_rotations(sglang_process, name):
    plain = sglang_process(sglang_models.other_tensors, QUANTISED[name], EngineLayout())
    assert plain == {"rotary_emb.cos_sin_cache"}
    quantised = sglang_process(sglang_models.other_tensors, QUANTISED[name], EngineLayout(), Form(scales=SCALES))
    of_cache = {"k_scale", "v_scale"} if "kv_lora_rank" in QUANTISED[name] else set()
    assert {each.rsplit(".", 1)[1] for each in quantised} == {"cos_sin_cache"} | of_cache


@pytest.mark.parametrize(
    ("name", "layout", "part"),
    [
        ("qwen3", EngineLayout(8), r"mlp\.gate_proj.*\(64, 256\)"),
        ("deepseek_v3", EngineLayout(4, expert=4, data_attention=4), r"shared_experts\.gate_proj.*\(64, 256\)"),
        ("qwen3_moe", EngineLayout(4), r"experts\.\{expert\}\.gate_proj.*\(64, 256\)"),
    ],
)
def test_a_shard_that_ends_inside_a_block_is_refused_by_sglang_and_by_the_table(sglang_process, name, layout, part):
    form = Form(scales=SCALES)
    config = QUANTISED[name] | {"num_key_value_heads": 8, "num_attention_heads": 8}
    assert "128" in sglang_process(sglang_models.refusal, config, layout, form)
    with pytest.raises(LayoutError, match=part):
        family_of(config).engine_placements(config, layout, 0, form)


def test_w13_derived_weights_follow_a_direct_write_only_once_post_load_weights_ran(sglang_process):
    """Fault: kv_b_proj is written in place. The engine computes with w_kc and w_vc, which are no parameters."""
    found = sglang_process(sglang_models.derived_after_write, CONFIGS["deepseek_v3"], PLAIN)
    assert found == {"w_kc": (False, True), "w_vc": (False, True)}


def test_the_router_of_glm_and_the_correction_of_every_router_are_wider_than_the_model():
    """That SGLang holds them so is part of every comparison above."""
    for name in ("glm4_moe", "deepseek_v3"):
        tensors = family_of(CONFIGS[name]).logical_tensors(CONFIGS[name])
        wide = {tensor.name for tensor in tensors if tensor.dtype.itemsize == 4}
        assert any(each.endswith("e_score_correction_bias") for each in wide)
        assert any(each.endswith("mlp.gate.weight") for each in wide) == (name == "glm4_moe")
