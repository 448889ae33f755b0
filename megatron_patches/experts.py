"""Patches that let mixtures of experts and latent attention run on the CPU over gloo."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.device import import_quietly
from megatron_patches.registry import cpu_patch


@cpu_patch
def names_of_transformer_engine_are_absent() -> None:
    """Two modules take Transformer Engine for present where it is not.

    For megatron-core 0.16.1: moe_utils asks `te_general_gemm is not None`, but binds the name only when the import
    succeeds; multi_latent_attention imports stand-ins for its classes, takes them for these and asks isinstance().
    """
    moe_utils: Any = import_quietly("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    latent: Any = import_quietly("megatron.core.transformer.multi_latent_attention")
    latent.HAVE_TE = import_quietly("megatron.core.extensions.transformer_engine").HAVE_TE


@cpu_patch
def alltoall_splits_are_numbers() -> None:
    """The dispatcher's split sizes become numbers only on their way off the GPU; all_to_all_single refuses tensors.

    For megatron-core 0.16.1, token_dispatcher.
    """
    token_dispatcher: Any = import_quietly("megatron.core.transformer.moe.token_dispatcher")
    real = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return real(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


@cpu_patch
def uneven_splits_over_gloo() -> None:
    """With tensor parallelism inside experts the dispatcher gathers and reduce-scatters unequal pieces; gloo takes
    equal ones only: pieces are padded to the longest, or all-reduced and cut.

    For megatron-core 0.16.1, tensor_parallel.mappings.
    """
    mappings: Any = import_quietly("megatron.core.tensor_parallel.mappings")
    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        part: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        sizes = output_split_sizes
        if sizes is None or group.size() == 1:
            return even_gather(part, group, None, use_global_buffer)
        longest = max(sizes)
        padded = part.new_zeros((longest, *part.shape[1:]))
        padded[: len(part)] = part
        whole = part.new_empty((longest * len(sizes), *part.shape[1:]))
        dist.all_gather_into_tensor(whole, padded, group=group)
        return torch.cat([each[:size] for each, size in zip(whole.split([longest] * len(sizes)), sizes, strict=True)])

    def scatter(
        whole: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        sizes = input_split_sizes
        if sizes is None or group.size() == 1:
            return even_scatter(whole, group, None, use_global_buffer)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter
