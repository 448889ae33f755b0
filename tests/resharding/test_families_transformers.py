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
}


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 12}


def saved(directory: Path, model_type: str, **changes: object) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """A tiny model as transformers saves it; returns shape and dtype of each tensor in the file."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[model_type])
    sizes = {**SIZES, **(EXPERTS if "moe" in model_type else {}), **changes}
    model_class(config_class(**sizes)).to(torch.bfloat16).save_pretrained(directory)
    return {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in load_file(directory / "model.safetensors").items()
    }


def test_every_family_is_compared_here():
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [(name, tied) for name in CLASSES for tied in (False, True) if not (tied and "moe" in name)],
)
def test_w10_logical_tensors_are_the_checkpoints_keys_and_shapes(model_type, tied, tmp_path):
    expected = saved(tmp_path, model_type, tie_word_embeddings=tied)
    config = read_config(tmp_path)
    tensors = family_of(config).logical_tensors(config)
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors} == expected
    assert ("lm_head.weight" in expected) != tied
    with HfCheckpoint(tmp_path) as checkpoint:
        check_keys(checkpoint, tensors)


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_config_without_optional_keys_means_what_transformers_means(model_type, tmp_path):
    expected = saved(tmp_path, model_type, num_key_value_heads=4)
    config = {"model_type": model_type, **SIZES, **(EXPERTS if "moe" in model_type else {}), "num_key_value_heads": 4}
    tensors = family_of(config).logical_tensors(config, torch.bfloat16)
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors} == expected
