"""How many compiled kernels a process without a GPU keeps.

oneDNN and PyTorch's layer over it keep a kernel for each size of matrices that they have seen, 1,024 of them each:
hundreds of MiB in a process whose sizes vary, as those of packs and of batches of requests do. A size returns within
its step, from layer to layer; few are enough.
"""

import os

KEPT_KERNELS = 16
"""By each cache; a step of a dense model takes 15. Measured in training: 64 let the heap grow still, none cost 6 % of
the time."""


def bounded_kernel_caches() -> dict[str, str]:
    """Environment of a process that has yet to compute its first matrix product. What the user has set stays."""
    names = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    return {name: os.environ.get(name, str(KEPT_KERNELS)) for name in names}
