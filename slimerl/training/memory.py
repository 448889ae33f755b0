"""Memory that was used once is used again: glibc's allocator, told to keep more of it.

A training step frees and allocates the same tensors over and over. By default each larger one goes back to the kernel,
which fills new pages with zeros, one fault for every 4 KiB: measured, 4 % of a step of a 135M-parameter model. Tensors
up to `KEPT_BYTES` are kept; larger ones (logits) are not. The packs of each step have other sizes than the last, and
leave holes between what is kept: every `STEPS_BETWEEN_RETURNS` steps the free pages among them go back.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""

KEPT_BYTES = 32 * 2**20
"""The largest threshold that glibc takes on a 64-bit machine."""

FREE_BYTES = 512 * 2**20
"""Free memory at the end of the heap that is kept."""

STEPS_BETWEEN_RETURNS = 10
"""The next step's page faults are paid once in so many steps."""


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)


def return_freed_memory(step: int) -> None:
    """After training step `step`. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and step % STEPS_BETWEEN_RETURNS == 0:
        trim(0)
