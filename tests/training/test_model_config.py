"""What a `config.json` says is built exactly, or refused."""

import json

import pytest

from slimerl.spec.schema import ParallelSpec
from slimerl.training.model_config import UnsupportedModel, model_arguments, read_config

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
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known are llama, qwen3"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"logit_scale": 2.0}, "unknown key 'logit_scale' = 2.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta is 100000 and .* 5.0"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not a positive integer"),
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


ON_A_GPU = {
    "use_cpu_initialization": False,
    "gradient_accumulation_fusion": True,
    "apply_rope_fusion": True,
    "masked_softmax_fusion": True,
    "persist_layer_norm": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "cross_entropy_loss_fusion": False,
    "deallocate_pipeline_outputs": True,
}


def test_a_gpu_machine_gets_the_fused_kernels_and_a_cpu_none():
    from slimerl.training.capabilities import Capabilities
    from slimerl.training.model_config import machine_arguments

    gpu = machine_arguments(Capabilities(cuda=True, transformer_engine=True, apex=True))
    assert {key: value for key, value in gpu.items() if key != "attention_backend"} == ON_A_GPU
    assert gpu["attention_backend"].name == "auto"
    cpu = machine_arguments(Capabilities(cuda=False))
    assert cpu["attention_backend"].name == "local"
    assert cpu["use_cpu_initialization"]
    assert not any(cpu[key] for key in ON_A_GPU if key != "use_cpu_initialization")
