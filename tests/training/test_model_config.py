"""What a `config.json` says is built exactly, or refused."""

import json
from pathlib import Path

import pytest

from slimerl.spec.schema import ParallelSpec
from slimerl.training.config_reader import WITHOUT_EFFECT
from slimerl.training.model_config import UnsupportedModel, check_divisible, model_arguments, read_config

PUBLISHED = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "configs" / "models").glob("*.json")
}
TRAINABLE = {
    name: {key: value for key, value in config.items() if key != "quantization_config"}
    for name, config in PUBLISHED.items()
}
"""With the weights in bf16."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {},
}


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_smollm2s_configuration_is_read():
    arguments = model_arguments(LLAMA)
    assert arguments.transformer["kv_channels"] == 64
    assert arguments.transformer["num_query_groups"] == 3
    assert arguments.rotary_base == 100000.0
    assert arguments.tied_embeddings
    assert not arguments.transformer["qk_layernorm"]


def test_a_qwen3_without_head_dim_has_128_as_in_transformers():
    arguments = model_arguments(LLAMA | {"model_type": "qwen3"})
    assert arguments.transformer["kv_channels"] == 128
    assert arguments.transformer["qk_layernorm"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known are deepseek_v3, glm4_moe, kimi_k2, llama"),
        ({"model_type": ["qwen3"]}, "model_type '.'qwen3'.' is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"logit_scale": 2.0}, "unknown key 'logit_scale' = 2.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta is 100000 and .* 5.0"),
        (
            {"rope_parameters": {"rope_theta": 1e5}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope_parameters and rope_scaling contradict each other .default and linear .*leave out",
        ),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 100000 and .* 5.0"),
        (
            {"rope_scaling": {"rope_type": "default", "type": "linear"}},
            "rope_scaling has two types, default and linear",
        ),
        ({"rope_parameters": 5}, "rope_parameters = 5 is not an object"),
        ({"rope_scaling": ["linear"]}, "rope_scaling = .* is not an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta = 'x' is not a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, "rope_scaling: factor = 'x' is not a number"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rotary scaling"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a number"),
        ({"rope_theta": 10**400}, "rope_theta = 10+ is not a number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers = a number of 31 digits is more"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 is more than any model has"),
        ({"hidden_size": 10**30}, "hidden_size = a number of 31 digits is more"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a positive integer"),
        ({"layer_types": 5}, "layer_types other than a list"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1 is less than 0"),
        ({"rope_theta": 0}, "rope_theta = 0 is less than 1"),
        ({"head_dim": 33}, "33 of 33 elements of a head are rotated"),
        ({"rope_scaling": LLAMA3_SCALING}, "has no factor"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": None}}, "has no factor"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 0}}, "rope_scaling: factor = 0 is less than 1"),
        ({"rope_scaling": LLAMA3_SCALING | {"truncate": "no"}}, "truncate = .no. is neither true nor false"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256.5}},
            "original_max_position_embeddings = 256.5 is no whole number",
        ),
    ],
)
def test_s4_what_cannot_be_built_exactly_is_refused_by_its_key(changes, told):
    with pytest.raises(UnsupportedModel, match=told):
        model_arguments(LLAMA | changes)


def test_a_grid_that_does_not_divide_the_model_is_refused_with_the_number():
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.model_config import transformer_config

    with pytest.raises(UnsupportedModel, match=r"parallel\.tensor = 2 does not divide .*num_attention_heads = 9"):
        transformer_config(model_arguments(LLAMA), ParallelSpec(tensor=2), "fp32", Capabilities(cuda=False))


def test_a_directory_without_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA


QWEN3_30B, DEEPSEEK = TRAINABLE["qwen3_30b_a3b"], TRAINABLE["deepseek_v3_671b"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_or_refused_by_the_key_that_says_they_are_quantised(name):
    if "quantization_config" in PUBLISHED[name]:
        with pytest.raises(UnsupportedModel, match=r"quantization_config = .*convert the checkpoint first"):
            model_arguments(PUBLISHED[name])
    assert model_arguments(TRAINABLE[name]).transformer["num_layers"] == PUBLISHED[name]["num_hidden_layers"]


def test_deepseek_v3_is_read_whole():
    transformer = model_arguments(DEEPSEEK).transformer
    assert transformer["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert transformer["moe_shared_expert_intermediate_size"] == 2048
    assert (transformer["moe_router_num_groups"], transformer["moe_router_group_topk"]) == (8, 4)
    assert (transformer["rope_type"], transformer["rotary_scaling_factor"]) == ("yarn", 40.0)
    assert (transformer["mscale"], transformer["mscale_all_dim"]) == (1.0, 1.0)
    assert transformer["moe_router_bias_update_rate"] == transformer["moe_aux_loss_coeff"] == 0.0


def test_queries_without_a_latent_are_stated_by_null_and_not_by_silence():
    assert model_arguments(DEEPSEEK | {"q_lora_rank": None}).transformer["q_lora_rank"] is None
    with pytest.raises(UnsupportedModel, match="'q_lora_rank' is missing"):
        model_arguments({key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"})


def test_kimi_k2_is_a_deepseek_v3_of_other_sizes():
    kimi = TRAINABLE["kimi_k2_1t"]
    assert model_arguments(kimi) == model_arguments(kimi | {"model_type": "deepseek_v3"})


def test_glm45_rotates_half_of_each_head_and_has_biases_and_norms():
    arguments = model_arguments(TRAINABLE["glm45_355b"])
    assert arguments.rotary_percent == 0.5
    assert arguments.transformer["add_qkv_bias"]
    assert arguments.transformer["qk_layernorm"]


def test_where_all_groups_are_chosen_there_are_none():
    assert "moe_router_num_groups" not in model_arguments(TRAINABLE["kimi_k2_1t"]).transformer


KEPT_ASIDE = {"num_nextn_predict_layers"}
"""The prediction layer is not built; its tensors are copied into the export."""


@pytest.mark.parametrize("name", TRAINABLE)
def test_s1_no_key_of_a_published_model_is_ignored(name):
    """Fault: one key after another has another value. The arguments change, or the value is refused by its key."""
    config = TRAINABLE[name]
    scaling = config.get("rope_scaling", {})
    changed = {key: config | {key: _another(config[key])} for key in config.keys() - WITHOUT_EFFECT - KEPT_ASIDE}
    changed |= {
        f"rope_scaling, {key}": config | {"rope_scaling": scaling | {key: _another(scaling[key])}} for key in scaling
    }
    for key, other in changed.items():
        after = _outcome(other)
        if isinstance(after, str):
            assert key.split(",")[0] in after, key
        else:
            assert after != model_arguments(config), f"{key} is ignored"


def _outcome(config):
    try:
        return model_arguments(config)
    except UnsupportedModel as refused:
        return str(refused)


def _another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, str):
        return value + "x"
    return {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe", "DeepseekV3"])
def test_what_transformers_writes_of_a_default_model_is_read(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    default = getattr(transformers, f"{kind}Config")()
    default.save_pretrained(tmp_path)
    arguments = model_arguments(read_config(tmp_path))
    assert arguments.vocab_size == default.vocab_size
    assert arguments.experts == default.to_dict().get("n_routed_experts", getattr(default, "num_experts", 0))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"topk_group": 2}, "n_group = 8, topk_group = 2 with num_experts_per_tok = 8 .* megatron-core scores a group"),
        ({"num_experts_per_tok": 4}, "n_group = 8, topk_group = 4 with num_experts_per_tok = 4"),
        ({"n_group": 7}, "n_group = 7, topk_group = 4"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported, only 128"),
        ({"head_dim": 128}, "head_dim = 128 is not supported, only 64"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": None}}, "mscale_all_dim, but no mscale"),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"attention_factor": 1.2}}, "rotary scaling .*attention_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_experts": 8}, "unknown key 'num_experts' = 8"),
    ],
)
def test_s4_a_router_or_attention_that_megatron_computes_otherwise_is_refused(changes, told):
    with pytest.raises(UnsupportedModel, match=told):
        model_arguments(DEEPSEEK | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 .*experts in every layer"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = \\[0\\]"),
        ({"num_local_experts": 64}, "num_local_experts = 64 is not supported, only 128"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok = 200 exceeds the number of experts, 128"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_s4_a_qwen3_moe_with_dense_layers_or_too_few_experts_is_refused(changes, told):
    with pytest.raises(UnsupportedModel, match=told):
        model_arguments(QWEN3_30B | changes)


def test_probabilities_that_are_not_normalised_over_the_chosen_are_softmaxed_before():
    given = [model_arguments(QWEN3_30B | {"norm_topk_prob": norm}).transformer for norm in (True, False)]
    assert [transformer["moe_router_pre_softmax"] for transformer in given] == [False, True]


@pytest.mark.parametrize(
    ("config", "sizes", "told"),
    [
        ("smollm2_135m", {"tensor": 2}, r"tensor = 2 does not divide .*num_attention_heads = 9"),
        ("qwen3_8b", {"tensor": 16, "data": 2}, r"tensor = 16 does not divide .*num_query_groups = 8"),
        ("qwen3_8b", {"data": 2, "expert": 2}, r"expert = 2, but the model has no experts; remove it"),
        ("qwen3_8b", {"tensor": 2, "expert_tensor": 1}, r"expert_tensor = 1, but the model has no experts"),
        ("qwen3_8b", {"pipeline": 5}, r"pipeline \* virtual = 5 does not divide .* 36; .*pipeline_layout"),
        ("qwen3_8b", {"pipeline": 2, "pipeline_layout": "Et*20|t*15L"}, r"pipeline_layout = .* places 35 layers"),
        ("qwen3_8b", {"pipeline": 2, "pipeline_layout": "Et*20|t*16X"}, r"pipeline_layout.* has X"),
        ("qwen3_8b", {"pipeline": 2, "pipeline_layout": "Et*9|t*9|t*9|t*9L"}, r"2 chunks per stage, .*virtual = 1"),
        ("deepseek_v3_671b", {"pipeline": 2, "pipeline_layout": "Et*31|t*30mL"}, r"neither builds nor trains; remove"),
        ("qwen3_30b_a3b", {"tensor": 2}, r"set training\.parallel\.sequence_parallel: true"),
        ("qwen3_30b_a3b", {"data": 3, "expert": 3}, r"expert = 3 does not divide .*num_moe_experts = 128"),
        (
            "qwen3_30b_a3b",
            {"data": 10, "expert": 2, "expert_tensor": 5},
            r"expert_tensor = 5 does not divide .*moe_ffn_hidden_size = 768; set training\.parallel\.expert_tensor",
        ),
    ],
)
def test_s3_a_grid_that_does_not_divide_the_model_names_the_key_and_the_fix(config, sizes, told):
    with pytest.raises(UnsupportedModel, match=rf"training\.parallel\..*{told}"):
        check_divisible(model_arguments(TRAINABLE[config]), ParallelSpec(**sizes))


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("qwen3_30b_a3b", {"tensor": 4, "sequence_parallel": True, "data": 8, "expert": 32, "expert_tensor": 1}),
        ("deepseek_v3_671b", {"pipeline": 2, "pipeline_layout": "Et*31|t*30L"}),
        ("deepseek_v3_671b", {"tensor": 8, "sequence_parallel": True, "data": 8, "expert": 8}),
        ("kimi_k2_1t", {"pipeline": 61}),
    ],
)
def test_a_grid_that_divides_the_model_is_taken(config, sizes):
    check_divisible(model_arguments(TRAINABLE[config]), ParallelSpec(**sizes))


def test_every_size_of_the_grid_reaches_megatron():
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.model_config import transformer_config

    parallel = ParallelSpec(
        tensor=2,
        sequence_parallel=True,
        pipeline=2,
        virtual=2,
        pipeline_layout="Et*16|t*16|t*16|t*13L",
        context=2,
        data=4,
        expert=8,
        expert_tensor=1,
    )
    config = transformer_config(model_arguments(DEEPSEEK), parallel, "bf16", Capabilities(cuda=False))
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert (config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size) == (2, 2)
    assert str(config.pipeline_model_parallel_layout) == "Et*16|t*16|t*16|t*13L"
    assert (config.context_parallel_size, config.expert_model_parallel_size) == (2, 8)
    assert config.expert_tensor_parallel_size == 1
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert (config.moe_router_dtype, config.moe_router_bias_update_rate) == ("fp32", 0.0)


def test_a_pipeline_without_virtual_stages_sends_in_batches():
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.model_config import transformer_config

    config = transformer_config(model_arguments(LLAMA), ParallelSpec(pipeline=2), "fp32", Capabilities(cuda=False))
    assert config.virtual_pipeline_model_parallel_size is None
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (False, True)
