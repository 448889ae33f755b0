"""Megatron's own parameter names and shapes: real GPTModels, built in one process as any rank of any layout.

A *fake* process group (torch's own, for tests) has the ranks and sizes of a real one and moves nothing; building a
model asks for no more. What is here runs in a process of the rank pool, where Megatron is patched for the CPU.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from slimerl.resharding.layouts import MegatronLayout

Shapes = dict[str, tuple[int, ...]]


def shapes_on_every_rank(config: Mapping[str, Any], layout: MegatronLayout, **changes: Any) -> list[Shapes]:
    """For each rank of the layout, the names and shapes of parameters and persistent buffers."""
    with fake_ranks():
        found = []
        for rank in range(layout.world_size):
            with as_rank(rank, layout):
                found.append(shapes_of(build_chunks(config, layout, **changes)))
        return found


@contextlib.contextmanager
def fake_ranks() -> Iterator[None]:
    """Sets the pool's process group aside; it destroys some group after each call, so one is left for it."""
    import megatron_patches

    megatron_patches.apply()
    dist.destroy_process_group()
    try:
        yield
    finally:
        _fake_group(0, 1)


def _fake_group(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextlib.contextmanager
def as_rank(rank: int, layout: MegatronLayout) -> Iterator[None]:
    """Megatron's parallel state as rank `rank` of `layout` has it."""
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_latent_attention

    _fake_group(rank, layout.world_size)
    # Megatron 0.16.1 takes the stand-ins that it has for Transformer Engine's classes here for these themselves.
    without_te = mock.patch.object(multi_latent_attention, "HAVE_TE", False)
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        with without_te:
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def transformer_config(config: Mapping[str, Any], layout: MegatronLayout, **changes: Any) -> Any:
    """Megatron's configuration of the model of a config.json, as far as names and shapes depend on it."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    latent = "kv_lora_rank" in config
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    arguments = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.get("attention_bias", False) or config["model_type"] == "qwen2",
        "qk_layernorm": latent or config.get("use_qk_norm", config["model_type"].startswith("qwen3")),
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor_size,
        "pipeline_dtype": torch.float32,
        "sequence_parallel": False,
        "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
    }
    if latent:
        arguments |= {
            "multi_latent_attention": True,
            "q_lora_rank": config["q_lora_rank"],
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "rope_type": "rope",
        }
    else:
        arguments |= {"num_query_groups": config["num_key_value_heads"], "kv_channels": config["head_dim"]}
    if experts := config.get("n_routed_experts") or config.get("num_experts"):
        dense = config.get("first_k_dense_replace", 0)
        arguments |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        }
    if "n_routed_experts" in config:
        arguments |= {
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }
    return (MLATransformerConfig if latent else TransformerConfig)(**arguments | changes)


class NoAttention(torch.nn.Module):
    """In place of the core attention, which has no parameters: Megatron's own takes no latent attention."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def adapted(spec: Any, whole_latents: bool) -> Any:
    """The specification without core attention and, where asked for, with latent attention's down-projections on every
    rank, as in Transformer Engine's."""
    from megatron.core.post_training.modelopt.layers import Linear

    if isinstance(spec, list):
        return [adapted(each, whole_latents) for each in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    parts = {field.name: adapted(getattr(spec, field.name), whole_latents) for field in dataclasses.fields(spec)}
    if "core_attention" in parts:
        parts["core_attention"] = NoAttention
    if whole_latents and "linear_kv_down_proj" in parts:
        parts |= {"linear_q_down_proj": Linear, "linear_kv_down_proj": Linear}
    return dataclasses.replace(spec, **parts)


def build_chunks(config: Mapping[str, Any], layout: MegatronLayout, **changes: Any) -> dict[str, torch.nn.Module]:
    """The rank's model chunks by the prefix that placements use; call inside `as_rank`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    megatron = transformer_config(config, layout, **changes)
    chunks = {}
    for chunk in range(layout.virtual):
        stage = chunk if layout.virtual > 1 else None
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(megatron, False, normalization="RMSNorm", vp_stage=stage)
        prediction = None
        if megatron.mtp_num_layers and mtp_on_this_rank(megatron, ignore_virtual=False, vp_stage=stage):
            # of the last layer, which may be in another stage
            last = gpt_layer_specs.get_gpt_decoder_layer_specs(megatron, False, normalization="RMSNorm")[-1]
            prediction = gpt_layer_specs.get_gpt_mtp_block_spec(megatron, last, False, vp_stage=stage)
        spec, prediction = (adapted(each, not layout.split_latent) for each in (spec, prediction))
        chunks["" if stage is None else f"model{chunk}."] = GPTModel(
            megatron,
            spec,
            layout.padded_vocabulary(config["vocab_size"]),
            32,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
            position_embedding_type="rope",
            vp_stage=stage,
            mtp_block_spec=prediction,
        )
    return chunks


def shapes_of(chunks: Mapping[str, torch.nn.Module]) -> Shapes:
    """Names and shapes of parameters and persistent buffers."""
    return {
        prefix + name: tuple(tensor.shape)
        for prefix, chunk in chunks.items()
        for name, tensor in chunk.state_dict().items()
        if not name.endswith("_extra_state")
    }
