"""A Hugging Face `config.json` → what Megatron needs to build the same model on this grid and machine.

Flows in: the parsed `config.json`, the process grid, the dtype, the machine's capabilities. Flows out:
`ModelArguments` (the model alone, `architecture.py`) and Megatron's `TransformerConfig`. Invariant: a key that would
change the computation and that is not honoured is refused, so that the built model equals the published one.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slimerl.spec.schema import ParallelSpec
from slimerl.training.architecture import FAMILIES, ModelArguments, model_arguments
from slimerl.training.capabilities import Capabilities
from slimerl.training.config_reader import UnsupportedModel
from slimerl.training.divisibility import check_divisible
from slimerl.training.machine_arguments import machine_arguments, recompute_arguments

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "FAMILIES",
    "ModelArguments",
    "UnsupportedModel",
    "check_divisible",
    "model_arguments",
    "read_config",
    "transformer_config",
]


def read_config(model_path: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory.

    Raises:
        UnsupportedModel: there is none, or it is no JSON object.
    """
    if not model_path.is_dir():
        raise UnsupportedModel(
            f"there is no directory {model_path}; name a Hugging Face checkpoint "
            f"(a relative path starts at {Path.cwd()})"
        )
    file = model_path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(
            f"{file}: cannot be read ({error}); model.path must be a Hugging Face checkpoint directory"
        ) from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{file}: holds {type(config).__name__}, not an object; it must describe a model")
    return config


def transformer_config(
    arguments: ModelArguments,
    parallel: ParallelSpec,
    dtype: str,
    capabilities: Capabilities,
    recompute: str = "none",
    replays_routing: bool = False,
) -> "TransformerConfig":
    """Megatron's configuration of the model on this grid and machine; `dtype` is "fp32" or "bf16".

    Raises:
        UnsupportedModel: the grid does not divide the model.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    check_divisible(arguments, parallel)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    kind = MLATransformerConfig if arguments.latent_attention else TransformerConfig
    return kind(
        **arguments.transformer,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch_dtype,
        bf16=dtype == "bf16",
        pipeline_dtype=torch_dtype,
        **parallel_arguments(parallel),
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
        **recompute_arguments(recompute),
        **machine_arguments(arguments.transformer, capabilities, replays_routing),
    )


def _leave_as_allocated(weight: torch.Tensor) -> None:
    """Initialise nothing."""


def parallel_arguments(parallel: ParallelSpec) -> dict[str, Any]:
    """The arguments of `TransformerConfig` that say how the model is spread over ranks."""
    virtual = parallel.virtual if parallel.virtual > 1 else None
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        # without it the interleaved schedule sends and receives in batches, which over gloo gives wrong losses
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    }
