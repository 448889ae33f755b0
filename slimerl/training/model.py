"""The policy: Megatron's GPTModel that answers with log-probabilities, wrapped for mixed precision and data parallel.

Flows in: `ModelArguments`, the grid, the weights of a Hugging Face checkpoint. Flows out: the model chunks of this
rank. Invariant: a chunk's parameters all come from the checkpoint; none is left as allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slimerl.training.capabilities import Capabilities
from slimerl.training.layer_specs import build_spec
from slimerl.training.logprobs import VocabularyShard, token_logprobs
from slimerl.training.machine_arguments import data_parallel_arguments
from slimerl.training.model_config import ModelArguments
from slimerl.training.rotary import PositionedRotary


@dataclass(frozen=True)
class WantedTokens:
    """The tokens whose log-probabilities a forward pass returns: token `tokens[i]` after position `positions[i]`."""

    positions: torch.Tensor
    tokens: torch.Tensor
    temperature: float = 1.0


class PolicyModel(GPTModel):
    """GPTModel whose `labels` may be `WantedTokens`: the output layer is then applied to these positions alone.

    `forward` returns (log-probabilities, entropies), each [wanted tokens], float32; without labels the logits.
    """

    true_vocabulary: int

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        if not isinstance(labels, WantedTokens) or not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=labels, **kwargs)
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        hidden = self._hidden_of(hidden_states, labels.positions)
        group = self.pg_collection.tp
        shard = VocabularyShard(
            weight.shape[0] * group.rank(), self.true_vocabulary, group if group.size() > 1 else None
        )
        return token_logprobs(hidden, weight, labels.tokens, labels.temperature, shard)

    def _hidden_of(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [positions, width] on every tensor-parallel rank, whose gradients are summed over them."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
            return whole[:, 0].index_select(0, positions)
        chosen = hidden_states[:, 0].index_select(0, positions)
        return tensor_parallel.copy_to_tensor_model_parallel_region(chosen, group=group)


def build_chunks(
    arguments: ModelArguments,
    config: TransformerConfig,
    capabilities: Capabilities,
    vocabulary_rows: int,
    kind: type[GPTModel] = PolicyModel,
) -> list[torch.nn.Module]:
    """The model chunks of this rank (one, without virtual pipeline stages), in the model's dtype, not yet loaded.

    Args:
        vocabulary_rows: of the embedding over all ranks, padding included.
        kind: `PolicyModel`, or `value_model.ValueModel`.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for stage in [None] if virtual is None else list(range(virtual)):
        model = kind(
            config=config,
            transformer_layer_spec=build_spec(config, capabilities, stage),
            vocab_size=vocabulary_rows,
            max_sequence_length=arguments.max_sequence_tokens,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=arguments.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=arguments.rotary_percent,
            rotary_base=arguments.rotary_base,
            rope_scaling=arguments.llama3_rope_factor is not None,
            rope_scaling_factor=arguments.llama3_rope_factor or 1.0,
            vp_stage=stage,
        )
        if isinstance(model, PolicyModel):
            model.true_vocabulary = arguments.vocab_size
        if capabilities.segmented:
            _take_positions_from_packs(model)
        chunks.append(Float16Module(config, model) if config.bf16 else model)
    return chunks


def _take_positions_from_packs(model: GPTModel) -> None:
    """Rotary modules stand in the model, or in each layer of latent attention."""
    latent = model.config.multi_latent_attention
    for module in list(model.modules()):
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, torch.nn.Module) and not isinstance(rotary, PositionedRotary):
            module.rotary_pos_emb = PositionedRotary(rotary, with_batch=not latent)


def wrap_for_training(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, overlap: bool = False
) -> list[torch.nn.Module]:
    """Data parallelism with the distributed optimizer: gradients are reduced in float32, each rank keeps a part.

    Args:
        overlap: reduce gradients while the backward pass goes on.
    """
    ddp = DistributedDataParallelConfig(**data_parallel_arguments(overlap))
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    if overlap:
        # Megatron's schedules reduce after the last micro-batch alone, and at the same time on all pipeline stages
        without, reduce = [chunk.no_sync for chunk in wrapped], [chunk.start_grad_sync for chunk in wrapped]
        config.no_sync_func = without if len(wrapped) > 1 else without[0]
        config.grad_sync_func = reduce if len(wrapped) > 1 else reduce[0]
    return wrapped


def dismantle(chunks: Sequence[torch.nn.Module]) -> None:
    """Of what `wrap_for_training` made: it can do nothing more, and all of it goes with the last reference. As it was
    it never would: autograd's nodes hold the wrapper through hooks that Python's collector does not see, the wrapper
    holds the optimizer, and that the nodes. Rotary modules, and through them a process group, are held by the cache of
    what they have answered, which is their class's."""
    for module in [module for chunk in chunks for module in chunk.modules()]:
        if forget := getattr(type(module).forward, "cache_clear", None):
            forget()
    for chunk in chunks:
        vars(chunk).clear()


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside its wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk
