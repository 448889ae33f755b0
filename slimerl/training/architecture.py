"""A Hugging Face `config.json` → the arguments with which Megatron builds the same model.

Flows in: the parsed file. Flows out: `ModelArguments`, apart from how the model is spread over ranks.
Invariant: a key that would change the computation is honoured or refused by its name, so that the built model equals
the published one. Sources of what the keys mean: transformers 5.19, megatron-core 0.16.1.

The multi-token-prediction layer is not built: the policy's loss does not train it. An export copies its tensors
unchanged from the checkpoint that the model was loaded from (`weights.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.families import deepseek_v3, glm4_moe, qwen3
from slimerl.resharding.families.blocks import MOST_EXPERTS, MOST_LAYERS
from slimerl.training.config_reader import ConfigReader, UnsupportedModel, at_least
from slimerl.training.config_rotary import Rotary, check_rotated, latent_rotary, llama3_factor, read_rotary


@dataclass(frozen=True)
class ModelArguments:
    """One model, apart from how it is spread over ranks.

    `transformer` holds the arguments of `TransformerConfig` (`MLATransformerConfig` for latent attention); the rest
    are arguments of `GPTModel`.
    """

    transformer: Mapping[str, Any]
    vocab_size: int
    max_sequence_tokens: int
    rotary_base: float
    rotary_percent: float
    llama3_rope_factor: float | None
    """Llama 3's frequency scaling, None for plain rotary embeddings."""
    tied_embeddings: bool

    @property
    def latent_attention(self) -> bool:
        return "kv_lora_rank" in self.transformer

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0: a dense model."""
        return self.transformer.get("num_moe_experts", 0)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers that have experts, counted from 0."""
        return tuple(layer for layer, sparse in enumerate(self.transformer.get("moe_layer_freq", ())) if sparse)


@dataclass(frozen=True)
class FamilyFacts:
    """What a family's `config.json` does not say because it is true of the whole family."""

    qk_layernorm: bool = False
    qkv_bias: bool = False
    attention_switches: bool = False
    """`use_qk_norm` and `attention_bias` say whether there are norms and biases."""
    head_dim: int | None = None
    """transformers' default where the file has none; None: hidden size / heads."""
    partial_rotary: float | None = None
    """transformers' default of `partial_rotary_factor`; None: whole heads are rotated."""
    latent: bool = False
    """Multi-head latent attention."""
    experts: Callable[[ConfigReader, int], dict[str, Any]] | None = None
    """Reads the keys of a mixture of experts; its second argument is the number of layers."""


def model_arguments(config: Mapping[str, Any]) -> ModelArguments:
    """What the `config.json` says of the model.

    Raises:
        UnsupportedModel: unknown `model_type`, a missing, unknown or contradicting key.
    """
    reader = ConfigReader(config)
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type '{model_type}' is not supported; known are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    _refuse_what_cannot_be_built(reader)
    rotary = read_rotary(reader, family.partial_rotary)
    layers = reader.integer("num_hidden_layers", most=MOST_LAYERS)
    transformer: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": reader.integer("hidden_size"),
        "ffn_hidden_size": reader.integer("intermediate_size"),
        "layernorm_epsilon": at_least(0, "rms_norm_eps", reader.number("rms_norm_eps")),
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
    transformer |= _latent_attention(reader, rotary) if family.latent else _grouped_attention(reader, family)
    check_rotated(transformer["qk_pos_emb_head_dim" if family.latent else "kv_channels"], rotary.percent)
    transformer |= family.experts(reader, layers) if family.experts else {}
    arguments = ModelArguments(
        transformer=transformer,
        vocab_size=reader.integer("vocab_size"),
        max_sequence_tokens=reader.integer("max_position_embeddings"),
        rotary_base=rotary.base,
        rotary_percent=rotary.percent,
        llama3_rope_factor=None if family.latent else llama3_factor(rotary),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )
    reader.finish()
    return arguments


def _refuse_what_cannot_be_built(config: ConfigReader) -> None:
    config.only("hidden_act", "silu")
    config.only("mlp_bias", False)
    config.only("attention_dropout", 0)
    config.only("pretraining_tp", 1)
    config.only("rope_interleaved", False)
    config.only("use_sliding_window", False)
    config.only("use_mrope", False)
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel("config.json: layer_types other than a list of full_attention are not supported")
    if config.get("sliding_window") is not None and "use_sliding_window" not in config:
        raise UnsupportedModel("config.json: sliding_window is not supported")
    config.never("quantization_config", "training needs the weights in bf16 or fp32; convert the checkpoint first")


def _grouped_attention(config: ConfigReader, family: FamilyFacts) -> dict[str, Any]:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if family.attention_switches:
        norms, biases = config.flag("use_qk_norm", False), config.flag("attention_bias", False)
    else:
        norms, biases = family.qk_layernorm, family.qkv_bias
        config.only("attention_bias", False)
    return {
        "num_attention_heads": heads,
        "num_query_groups": config.integer("num_key_value_heads", heads),
        "kv_channels": config.integer("head_dim", family.head_dim or hidden // heads),
        "qk_layernorm": norms,
        "add_qkv_bias": biases,
    }


def _latent_attention(config: ConfigReader, rotary: Rotary) -> dict[str, Any]:
    """Queries, keys and values through narrow latents (DeepSeek-V2, arXiv 2405.04434)."""
    heads = config.integer("num_attention_heads")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    config.only("num_key_value_heads", heads, why="with latent attention it equals num_attention_heads")
    config.only("attention_bias", False)
    config.only("rope_interleave", True, why="megatron-core rotates neighbouring elements of latent attention")
    # transformers writes these two; they follow from others
    config.only("head_dim", rope, why="it repeats qk_rope_head_dim")
    config.only("qk_head_dim", nope + rope, why="it is qk_nope_head_dim + qk_rope_head_dim")
    return {
        "multi_latent_attention": True,
        "num_attention_heads": heads,
        "q_lora_rank": config.integer("q_lora_rank") if not config.is_null("q_lora_rank") else None,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "qk_head_dim": nope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": config.integer("v_head_dim"),
        "qk_layernorm": True,
        "add_qkv_bias": False,
    } | latent_rotary(rotary)


ROUTED = {
    "moe_router_dtype": "fp32",
    # Balance is a matter of pre-training: no auxiliary loss, and the correction biases stay as they are.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
}
"""Arguments of every mixture of experts."""


def _softmax_experts(config: ConfigReader, layers: int) -> dict[str, Any]:
    """Qwen3-MoE: the weights of the chosen experts are softmax probabilities, over all or over the chosen ones."""
    experts = config.integer("num_experts" if "num_experts" in config else "num_local_experts", most=MOST_EXPERTS)
    config.only("num_local_experts", experts, why="num_experts says so")
    everywhere = "SGLang's Qwen3-MoE has experts in every layer"
    config.only("decoder_sparse_step", 1, why=everywhere)
    config.only("mlp_only_layers", [], why=everywhere)
    normalised = config.flag("norm_topk_prob", False)
    topk = _topk(config, experts)
    if normalised and topk == 1:
        raise UnsupportedModel("config.json: norm_topk_prob = True with num_experts_per_tok = 1 leaves no weight")
    return ROUTED | {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size"),
        "moe_layer_freq": [1] * layers,
        "moe_router_score_function": "softmax",
        # a softmax over the chosen logits is the softmax over all, divided by the sum over the chosen
        "moe_router_pre_softmax": not normalised,
    }


def _sigmoid_experts(dense_layers: int, shared_experts: int) -> Callable[[ConfigReader, int], dict[str, Any]]:
    """DeepSeek-V3's router (arXiv 2412.19437): sigmoid scores, a correction bias that only chooses, groups of experts.

    The arguments are the family's defaults of `first_k_dense_replace` and `n_shared_experts`.
    """

    def read(config: ConfigReader, layers: int) -> dict[str, Any]:
        experts, width = config.integer("n_routed_experts", most=MOST_EXPERTS), config.integer("moe_intermediate_size")
        topk = _topk(config, experts)
        if config.flag("norm_topk_prob", True) != (topk > 1):
            raise UnsupportedModel(
                f"config.json: norm_topk_prob = {topk == 1} is not supported with num_experts_per_tok = {topk}: "
                "megatron-core normalises the weights of several experts, and only these"
            )
        config.only("scoring_func", "sigmoid")
        config.only("topk_method", "noaux_tc", why="without it the router has no correction bias")
        config.only("moe_layer_freq", 1, why="SGLang has experts in every layer after the dense ones")
        config.get("num_nextn_predict_layers")  # not built, see the module's docstring
        dense = min(config.integer("first_k_dense_replace", dense_layers, least=0), layers)
        shared = config.integer("n_shared_experts", shared_experts, least=0)
        return (
            ROUTED
            | _groups(config, experts, topk)
            | {
                "num_moe_experts": experts,
                "moe_router_topk": topk,
                "moe_ffn_hidden_size": width,
                "moe_layer_freq": [0] * dense + [1] * (layers - dense),
                "moe_shared_expert_intermediate_size": shared * width or None,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": config.number("routed_scaling_factor"),
            }
        )

    return read


def _topk(config: ConfigReader, experts: int) -> int:
    topk = config.integer("num_experts_per_tok")
    if topk > experts:
        raise UnsupportedModel(f"config.json: num_experts_per_tok = {topk} exceeds the number of experts, {experts}")
    return topk


def _groups(config: ConfigReader, experts: int, topk: int) -> dict[str, Any]:
    """Experts are chosen from the best `topk_group` of `n_group` groups. A group's score is the sum of its two best
    experts; megatron-core takes its topk // topk_group best."""
    groups, chosen = config.integer("n_group"), config.integer("topk_group")
    if chosen == groups:
        return {}
    if chosen > groups or experts % groups or topk // chosen != 2 or chosen * (experts // groups) < topk:
        raise UnsupportedModel(
            f"config.json: n_group = {groups}, topk_group = {chosen} with num_experts_per_tok = {topk} of {experts} "
            "experts is not supported: groups must be equal, and megatron-core scores a group by its "
            "num_experts_per_tok // topk_group best experts, the model by its 2 best"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


_DEEPSEEK = FamilyFacts(latent=True, experts=_sigmoid_experts(deepseek_v3.DENSE_LAYERS, deepseek_v3.SHARED_EXPERTS))

FAMILIES = {
    "llama": FamilyFacts(),
    "qwen2": FamilyFacts(qkv_bias=True),
    "qwen3": FamilyFacts(qk_layernorm=True, head_dim=qwen3.HEAD_DIM),
    "qwen3_moe": FamilyFacts(qk_layernorm=True, experts=_softmax_experts),
    "glm4_moe": FamilyFacts(
        attention_switches=True,
        partial_rotary=0.5,
        experts=_sigmoid_experts(glm4_moe.DENSE_LAYERS, glm4_moe.SHARED_EXPERTS),
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
"""By `model_type`."""
