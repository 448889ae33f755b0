"""A Hugging Face `config.json` → what Megatron needs to build the same model.

Flows in: the parsed `config.json`, the process grid, the dtype, the machine's capabilities. Flows out:
`ModelArguments` (the model alone) and Megatron's `TransformerConfig`. Invariant: a key that would change the
computation and that is not honoured here is refused, so that the built model equals the published one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slimerl.spec.schema import ParallelSpec
from slimerl.training.capabilities import Capabilities

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class UnsupportedModel(ValueError):
    """The model cannot be built exactly; the message names the key of `config.json`."""


@dataclass(frozen=True)
class ModelArguments:
    """One model, apart from how it is spread over ranks.

    `transformer` holds the arguments of `TransformerConfig`; the rest are arguments of `GPTModel`.
    """

    transformer: Mapping[str, Any]
    vocab_size: int
    max_sequence_tokens: int
    rotary_base: float
    llama3_rope_factor: float | None
    """Llama 3's frequency scaling, None for plain rotary embeddings."""
    tied_embeddings: bool


@dataclass(frozen=True)
class FamilyFacts:
    """What a family's `config.json` does not say because it is true of the whole family."""

    qk_layernorm: bool
    head_dim: int | None = None
    """transformers' default where the file has none; None: hidden size / heads."""


FAMILIES = {"llama": FamilyFacts(qk_layernorm=False), "qwen3": FamilyFacts(qk_layernorm=True, head_dim=128)}
"""By `model_type`."""

HONOURED = frozenset(
    (
        *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings"),
        *("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window"),
    )
)
"""Keys that this module reads."""

REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
}
"""Keys of which only these values can be built."""

WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
        *("initializer_range", "transformers_version", "max_window_layers", "_name_or_path", "is_llama_config"),
        "transformers.js_config",
    )
)
"""Keys that do not change what the model computes."""


def read_config(model_path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory.

    Raises:
        UnsupportedModel: there is none, or it is not JSON.
    """
    file = model_path / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UnsupportedModel(
            f"{file}: cannot be read ({error}); model.path must be a Hugging Face checkpoint directory"
        ) from None


def model_arguments(config: Mapping[str, Any]) -> ModelArguments:
    """What the `config.json` says of the model.

    Raises:
        UnsupportedModel: unknown `model_type`, a missing, unknown or contradicting key.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type '{model_type}' is not supported; known are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    _refuse_what_would_be_ignored(config)
    rotary_base, llama3_factor = _rope(config)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    transformer = {
        "num_layers": _integer(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": _integer(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or family.head_dim or hidden // heads,
        "layernorm_epsilon": float(_present(config, "rms_norm_eps")),
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": family.qk_layernorm,
    }
    return ModelArguments(
        transformer=transformer,
        vocab_size=_integer(config, "vocab_size"),
        max_sequence_tokens=_integer(config, "max_position_embeddings"),
        rotary_base=rotary_base,
        llama3_rope_factor=llama3_factor,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def transformer_config(
    arguments: ModelArguments, parallel: ParallelSpec, dtype: str, capabilities: Capabilities
) -> "TransformerConfig":
    """Megatron's configuration of the model on this grid and machine; `dtype` is "fp32" or "bf16".

    Raises:
        UnsupportedModel: the grid does not divide the model.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    check_divisible(arguments, parallel)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    return TransformerConfig(
        **arguments.transformer,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch_dtype,
        bf16=dtype == "bf16",
        pipeline_dtype=torch_dtype,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        # gradients are sums over tokens until finalize_model_grads divides by the tokens of the global batch
        calculate_per_token_loss=True,
        # packs differ in length; Megatron asks for this dispatcher then, also where there are no experts
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The weights always come from a checkpoint. perform_initialization=False would also skip the marks
        # that make the gradient norm count a tensor-parallel parameter on every rank.
        init_method=_leave_as_allocated,
        output_layer_init_method=_leave_as_allocated,
        embedding_init_method=_leave_as_allocated,
        **machine_arguments(capabilities),
    )


def machine_arguments(capabilities: Capabilities) -> dict[str, Any]:
    """The arguments of `TransformerConfig` that depend on the machine: fused kernels where they exist."""
    from megatron.core.transformer.enums import AttnBackend

    fused = capabilities.transformer_engine
    return {
        "use_cpu_initialization": not capabilities.cuda,
        "attention_backend": AttnBackend.auto if fused else AttnBackend.local,
        "gradient_accumulation_fusion": capabilities.apex,
        "apply_rope_fusion": fused,
        "masked_softmax_fusion": fused,
        "persist_layer_norm": fused,
        "bias_activation_fusion": capabilities.cuda,
        "bias_dropout_fusion": capabilities.cuda,
        # log-probabilities are computed by slimerl.training.logprobs
        "cross_entropy_loss_fusion": False,
        # frees outputs that the next stage still needs when tensors are not copied to be sent (CPU)
        "deallocate_pipeline_outputs": capabilities.cuda,
    }


def _leave_as_allocated(weight: torch.Tensor) -> None:
    """Initialise nothing."""


def check_divisible(arguments: ModelArguments, parallel: ParallelSpec) -> None:
    """Raises UnsupportedModel where the grid does not divide the model; needs no megatron."""
    for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if arguments.transformer[key] % parallel.tensor:
            raise UnsupportedModel(
                f"training.parallel.tensor = {parallel.tensor} does not divide the model's {key} = "
                f"{arguments.transformer[key]}; choose a common divisor of the heads, KV heads and MLP width"
            )


def _refuse_what_would_be_ignored(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in REQUIRED_VALUES:
            buildable = REQUIRED_VALUES[key]
            if value is not None and value not in buildable:
                raise UnsupportedModel(f"config.json: {key} = {value!r} is not supported, only {buildable[0]!r}")
        elif key not in HONOURED | WITHOUT_EFFECT:
            raise UnsupportedModel(
                f"config.json: unknown key '{key}' = {value!r}; if it does not change what the model computes, "
                "add it to WITHOUT_EFFECT in slimerl/training/model_config.py"
            )
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedModel("config.json: layer_types other than full_attention are not supported")
    if config.get("sliding_window") is not None and "use_sliding_window" not in config:
        raise UnsupportedModel("config.json: sliding_window is not supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Rotary base and Llama 3's scaling factor, from `rope_parameters` (transformers 5) or the older two keys."""
    stated = config.get("rope_parameters") or {}
    scaling = stated or config.get("rope_scaling") or {}
    base = stated.get("rope_theta", config.get("rope_theta", 10_000.0))
    if "rope_theta" in config and base != config["rope_theta"]:
        raise UnsupportedModel(f"config.json: rope_theta is {config['rope_theta']} and in rope_parameters {base}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(base), None
    fixed_in_megatron = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(scaling.get(key) != value for key, value in fixed_in_megatron.items()):
        raise UnsupportedModel(f"config.json: rotary scaling {dict(scaling)} is not supported")
    return float(base), float(scaling["factor"])


def _present(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UnsupportedModel(f"config.json: '{key}' is missing")
    return config[key]


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = _present(config, key)
    if not isinstance(value, int) or value <= 0:
        raise UnsupportedModel(f"config.json: {key} = {value!r} is not a positive integer")
    return value
