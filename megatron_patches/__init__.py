"""Every change to megatron-core that slimerl makes, one function each: megatron-core on a machine without CUDA.

Flows in: nothing; call `apply()` once, before the first Megatron object is built. Flows out: an altered
`torch.cuda` and altered Megatron modules. Invariant: where CUDA is present, no patch changes anything for good
(`no_process_for_results` does so within its block).
"""

from megatron_patches.checkpoint import no_process_for_results
from megatron_patches.device import (
    cuda_literal_means_cpu,
    optimizers_accept_cpu_tensor_types,
    random_state_is_the_cpus,
    tensors_stay_on_the_cpu,
    torch_cuda_answers_for_the_cpu,
)
from megatron_patches.experts import (
    alltoall_splits_are_numbers,
    names_of_transformer_engine_are_absent,
    uneven_splits_over_gloo,
)
from megatron_patches.optimizer import adam_with_one_step_per_group
from megatron_patches.registry import PATCHES, UnknownMegatronVersion, apply
from megatron_patches.speed import packed_rope_without_a_loop, torch_compile_off

__all__ = [
    "PATCHES",
    "UnknownMegatronVersion",
    "adam_with_one_step_per_group",
    "alltoall_splits_are_numbers",
    "apply",
    "cuda_literal_means_cpu",
    "names_of_transformer_engine_are_absent",
    "no_process_for_results",
    "optimizers_accept_cpu_tensor_types",
    "packed_rope_without_a_loop",
    "random_state_is_the_cpus",
    "tensors_stay_on_the_cpu",
    "torch_compile_off",
    "torch_cuda_answers_for_the_cpu",
    "uneven_splits_over_gloo",
]
