"""Patches without which a CPU run is right, but slow."""

from megatron_patches.registry import cpu_patch


@cpu_patch
def torch_compile_off() -> None:
    """`@jit_fuser` is torch.compile: minutes of C++ compilation before the first step of a tiny model.

    For megatron-core 0.16.1: all modules under fusions/ and the rotary embedding.
    """
    import torch._dynamo

    torch._dynamo.config.disable = True
