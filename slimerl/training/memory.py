"""Memory that was used once is used again: glibc's allocator, told to keep more of it, and what to give back.

A training step frees and allocates the same tensors over and over. By default each larger one goes back to the kernel,
which fills new pages with zeros, one fault for every 4 KiB: measured, 4 % of a step of a 135M-parameter model. Tensors
up to `KEPT_BYTES` are kept; larger ones (logits) are not.

The packs of each step have other sizes than the last, and oneDNN and PyTorch's layer over it keep a compiled kernel for
each size that they have seen, 1,024 of them each: hundreds of MiB after a hundred steps, and, scattered over the heap,
holes between them that the next sizes do not fit into. A pack's sizes return within its step, from layer to layer: so
many are kept, `KEPT_KERNELS`. Holes that remain between steps are given back now and then: what a trainer holds between
its steps is then the same after a thousand of them, for a page fault here and there that keeping memory saves in all
others.
"""

import ctypes
import os

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""

KEPT_BYTES = 32 * 2**20
"""The largest threshold that glibc takes on a 64-bit machine."""

FREE_BYTES = 512 * 2**20
"""Free memory at the end of the heap that is kept."""

KEPT_KERNELS = 16
"""By each cache; a pack of a dense model takes 15. Measured: 64 let the heap grow still, none cost 6 % of the time."""

RETURN_STEPS = 10
"""Measured with the quickstart's model: 10 ms to give memory back, and 80 ms for the faults of the step after."""


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)


def bound_kernel_caches() -> None:
    """For this process; to be called before its first matrix product. What the user has set stays."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KEPT_KERNELS))


def return_freed_memory(step: int) -> None:
    """To the kernel, every `RETURN_STEPS` steps: what lies between the kernels and tensors that are kept.

    The heap is full of holes of the sizes of earlier packs; a pack of another size takes new memory.
    """
    if step % RETURN_STEPS == 0 and hasattr(psutil, "heap_trim"):
        psutil.heap_trim()
