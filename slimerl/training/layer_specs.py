"""Which modules a transformer layer is made of, by capability: Transformer Engine's, or Megatron's own with SDPA.

Flows in: Megatron's configuration and the machine's capabilities. Flows out: the layer specification that
`GPTModel` takes. A specification is Megatron's documented way to choose modules; nothing is patched here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from slimerl.training.attention import SdpaAttention
from slimerl.training.capabilities import Capabilities
from slimerl.training.matmul import CpuColumnParallelLinear, CpuRowParallelLinear


def build_spec(config: TransformerConfig, capabilities: Capabilities, virtual_stage: int | None = None) -> Any:
    """The decoder's block specification for this rank (and virtual pipeline stage)."""
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=capabilities.transformer_engine,
        normalization=config.normalization,
        vp_stage=virtual_stage,
    )
    if not capabilities.transformer_engine:
        return with_modules(spec, PORTABLE, whole_latents=True)
    return with_modules(spec, {TEDotProductAttention: SdpaAttention}) if capabilities.segmented else spec


class PortableNorm:
    """torch's RMSNorm or LayerNorm, with sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism, though all it lacks is the mark on its weights that
    makes finalize_model_grads add up their gradients over the tensor-parallel ranks.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


PORTABLE: dict[type, type] = {
    WrappedTorchNorm: PortableNorm,
    DotProductAttention: SdpaAttention,
    ColumnParallelLinear: CpuColumnParallelLinear,
    RowParallelLinear: CpuRowParallelLinear,
}


def with_modules(spec: Any, instead: Mapping[type, type], whole_latents: bool = False) -> Any:
    """A copy of a specification with other modules in place of some, at any depth.

    Experts of the portable specification are Megatron's SequentialMLP, one product after the other; the grouped
    product needs Transformer Engine.
    """
    if isinstance(spec, ModuleSpec):
        module = instead.get(spec.module, spec.module) if isinstance(spec.module, type) else spec.module
        return dataclasses.replace(
            spec, module=module, submodules=with_modules(spec.submodules, instead, whole_latents)
        )
    if isinstance(spec, list):
        return [with_modules(each, instead, whole_latents) for each in spec]
    if isinstance(spec, type):
        return instead.get(spec, spec)
    if dataclasses.is_dataclass(spec):
        parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        changed = {name: with_modules(part, instead, whole_latents) for name, part in parts.items()}
        if whole_latents:
            changed |= _whole_latents(spec)
        return dataclasses.replace(spec, **changed)  # type: ignore[type-var]
    return spec


def _whole_latents(spec: Any) -> dict[str, Any]:
    """Latent attention's down-projections, held whole by every tensor-parallel rank, as Transformer Engine's
    specification has them. Cut, as in Megatron's local one, the gradient of the rotary part of the keys would lack
    its sum over the ranks. `Linear` ignores `init_method`; the weights come from a checkpoint."""
    if not isinstance(spec, MLASelfAttentionSubmodules):
        return {}
    # latent attention asks for this very class, so no faster product is put in its place
    return {"linear_q_down_proj": Linear, "linear_kv_down_proj": Linear}
