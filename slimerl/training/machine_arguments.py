"""What Megatron is told because of the machine, not because of the model: which kernels, which overlap.

Flows in: the model's arguments of `TransformerConfig`, the dtype, the machine's capabilities. Flows out: further
arguments of `TransformerConfig`, of `DistributedDataParallelConfig` and of `OptimizerConfig`.
Invariant: a fused kernel is asked for only where the library that has it is present and Megatron takes the switch.
"""

from collections.abc import Mapping
from typing import Any

from slimerl.training.capabilities import Capabilities


def machine_arguments(
    model: Mapping[str, Any], capabilities: Capabilities, replays_routing: bool = False
) -> dict[str, Any]:
    """Arguments of `TransformerConfig`, checked against megatron-core 0.16.1.

    Args:
        model: the model's own arguments of `TransformerConfig` or `MLATransformerConfig`.
        replays_routing: the routers take recorded experts.
    """
    from megatron.core.transformer.enums import AttnBackend

    fused = capabilities.transformer_engine
    # Megatron refuses the fused rotary embedding of latent attention unless it is YaRN's; it counts positions itself
    fused_rotary = fused and (
        not _is_latent(model) or (model.get("rope_type", "yarn") == "yarn" and not capabilities.segmented)
    )
    return {
        "use_cpu_initialization": not capabilities.cuda,
        # auto: Transformer Engine takes FlashAttention or cuDNN's kernel, whichever is faster here
        "attention_backend": AttnBackend.auto if fused else AttnBackend.local,
        "gradient_accumulation_fusion": capabilities.fuses_weight_gradients,
        "apply_rope_fusion": fused_rotary,
        "masked_softmax_fusion": fused,
        "persist_layer_norm": fused,
        "bias_activation_fusion": capabilities.cuda,
        "bias_dropout_fusion": capabilities.cuda,
        # log-probabilities are computed by slimerl.training.logprobs
        "cross_entropy_loss_fusion": False,
        # needs user buffers set up by hand, and a fixed sequence length: packs vary
        "tp_comm_overlap": False,
        # frees outputs that the next stage still needs when tensors are not copied to be sent (CPU)
        "deallocate_pipeline_outputs": capabilities.cuda,
        **(_expert_arguments(fused, replays_routing) if model.get("num_moe_experts") else {}),
    }


def _is_latent(model: Mapping[str, Any]) -> bool:
    return bool(model.get("multi_latent_attention"))


def _expert_arguments(fused: bool, replays_routing: bool) -> dict[str, Any]:
    return {
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        # Transformer Engine's kernel of the same function; it cannot replay a recorded routing
        "moe_router_fusion": fused and not replays_routing,
    }


def data_parallel_arguments(overlap: bool) -> dict[str, Any]:
    """Arguments of `DistributedDataParallelConfig`: each rank keeps a part of the optimizer's state, gradients are
    reduced in float32.

    Args:
        overlap: reduce a bucket of gradients while the backward pass computes the next.
    """
    return {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": overlap,
        # Would gather parameters while the next forward pass runs. Here they are read right after the update, to be
        # sent to the engines; and the output layer's weight is used apart from its module (`PolicyModel`), where
        # Megatron would not wait for it.
        "overlap_param_gather": False,
    }


def optimizer_arguments() -> dict[str, Any]:
    """Arguments of `OptimizerConfig` beside the spec's. Master weights and moments stay in float32: the
    precision-aware optimizer, which would round them, is off."""
    return {"optimizer": "adam", "use_distributed_optimizer": True, "use_precision_aware_optimizer": False}


def recompute_arguments(recompute: str) -> dict[str, Any]:
    """Arguments of `TransformerConfig` for `training.recompute`: what the backward pass computes a second time.

    Args:
        recompute: "none"; "selective": core attention; "full": every layer, of which only the input is kept.
    """
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
