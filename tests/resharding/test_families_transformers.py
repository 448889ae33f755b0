"""The tables know exactly the tensors that transformers' models have."""

import pytest
import torch

from slimerl.resharding.families import FAMILIES, family_of
from slimerl.resharding.hf_checkpoint import HfCheckpoint, check_keys, read_config

transformers = pytest.importorskip("transformers")

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def tiny_model(model_type: str, **changes: object) -> torch.nn.Module:
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[model_type])
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return getattr(transformers, model_class.__name__)(config_class(**{**sizes, **changes}))


def test_every_family_is_compared_here():
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", CLASSES)
def test_w10_logical_tensors_are_the_checkpoints_keys_and_shapes(model_type, tied, tmp_path):
    model = tiny_model(model_type, tie_word_embeddings=tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    tensors = family_of(config).logical_tensors(config)
    expected = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors} == expected
    assert ("lm_head.weight" in expected) != tied
    with HfCheckpoint(tmp_path) as checkpoint:
        check_keys(checkpoint, tensors)


def test_a_config_without_optional_keys_means_what_transformers_means():
    config = {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    for model_type in CLASSES:
        config["model_type"] = model_type
        model = getattr(transformers, CLASSES[model_type][1])(
            getattr(transformers, CLASSES[model_type][0])(**{k: v for k, v in config.items() if k != "model_type"})
        )
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert {t.name: t.shape for t in family_of(config).logical_tensors(config)} == shapes
