"""Tiny Hugging Face checkpoints for tests: real architectures, random weights, a byte-level tokenizer, fp32.

`make_tiny_model("qwen3", directory, seed=3)` writes what `from_pretrained` and SGLang load. The weights depend on
(family, tied, seed, sizes) alone. Norms are moved off one and biases off zero, so that one that is not loaded shows.
"""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
PAD, EOS = 0, 1
_SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES: dict[str, tuple[type, type]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
}
OPTIONAL = ("head_dim",)
"""Left out where None: the family has another way to say it."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        # With topk = 2 * topk_group, Megatron scores groups as everybody else does.
        "n_group": 2,
        "topk_group": 1,
        # transformers has no use for these; SGLang reads them.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # The only rotary embedding that SGLang computes for this family without a GPU; published models have it, too.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


def make_tiny_model(family: str, directory: Path, *, seed: int = 0, tied: bool = False, **sizes: Any) -> Path:
    """Write the checkpoint; returns `directory`.

    Args:
        tied: the output head is the embedding.
        sizes: fields of the family's Hugging Face configuration, over the small defaults (0.5M parameters).
    """
    model = tiny_model(family, seed=seed, tied=tied, **sizes)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def tiny_model(family: str, *, seed: int = 0, tied: bool = False, **sizes: Any) -> Any:
    """The model itself, in evaluation mode."""
    config_class, model_class = FAMILIES[family]
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": tied,
    }
    wanted = {**defaults, **OWN_SIZES.get(family, {}), **sizes}
    config = config_class(**{key: value for key, value in wanted.items() if value is not None or key not in OPTIONAL})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_class(config).to(torch.float32).eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name or name.endswith("bias"):
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    finally:
        torch.set_rng_state(state)
    return model


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast
