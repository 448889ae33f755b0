"""The tables know exactly the tensors that transformers' models have."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimerl.resharding.families import FAMILIES, family_of
from slimerl.resharding.hf_checkpoint import HfCheckpoint, check_keys, read_config

transformers = pytest.importorskip("transformers")

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    # transformers has no class for Kimi-K2: the model ships DeepSeek-V3's under its own name.
    "kimi_k2": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXTRA = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12},
    "glm4_moe": ROUTED,
    "deepseek_v3": ROUTED | LATENT,
    "kimi_k2": ROUTED | LATENT,
}
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {"tie_word_embeddings": tied}) for name in ("llama", "qwen2", "qwen3") for tied in (False, True)),
    ("qwen3_moe", {}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    ("glm4_moe", {"num_hidden_layers": 3, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    ("deepseek_v3", {"num_hidden_layers": 3, "first_k_dense_replace": 1}),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2}),
    ("kimi_k2", {"first_k_dense_replace": 1}),
]
KEPT_IN_FP32 = "e_score_correction_bias"
"""Published checkpoints have it in fp32; transformers' `to` casts it with the rest."""


def saved(directory: Path, model_type: str, **changes: object) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """A tiny model as transformers saves it; returns shape and dtype of each tensor in the file."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[model_type])
    sizes = {**SIZES, **EXTRA.get(model_type, {}), **changes}
    model_class(config_class(**sizes)).to(torch.bfloat16).save_pretrained(directory)
    return {
        name: (tuple(tensor.shape), torch.float32 if name.endswith(KEPT_IN_FP32) else tensor.dtype)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


def test_every_family_is_compared_here():
    assert CLASSES.keys() == FAMILIES.keys() == {name for name, _ in VARIANTS}


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=str)
def test_w10_logical_tensors_are_the_checkpoints_keys_and_shapes(model_type, changes, tmp_path):
    expected = saved(tmp_path, model_type, **changes)
    config = {**read_config(tmp_path), "model_type": model_type}
    tensors = family_of(config).checkpoint_tensors(config)
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors} == expected
    assert ("lm_head.weight" in expected) != bool(changes.get("tie_word_embeddings"))
    with HfCheckpoint(tmp_path) as checkpoint:
        check_keys(checkpoint, tensors)


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_config_without_optional_keys_means_what_transformers_means(model_type, tmp_path):
    expected = saved(tmp_path, model_type, num_key_value_heads=4)
    config = {"model_type": model_type, **SIZES, **EXTRA.get(model_type, {}), "num_key_value_heads": 4}
    tensors = family_of(config).checkpoint_tensors(config, torch.bfloat16)
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors} == expected


def test_the_router_of_glm_is_fp32_in_the_engine_and_bf16_in_the_checkpoint():
    config = {"model_type": "glm4_moe", **SIZES, **ROUTED}
    family, name = family_of(config), "model.layers.1.mlp.gate.weight"
    kinds = [
        {tensor.name: tensor.dtype for tensor in tensors}[name]
        for tensors in (
            family.logical_tensors(config, torch.bfloat16),
            family.checkpoint_tensors(config, torch.bfloat16),
        )
    ]
    assert kinds == [torch.float32, torch.bfloat16]
