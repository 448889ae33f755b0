"""Memory that was used once is used again: glibc's allocator, told not to give it back to the kernel.

A training step frees and allocates the same large tensors over and over. By default each goes back to the kernel,
which fills new pages with zeros, one fault for every 4 KiB: a quarter of a step of a 135M-parameter model. Kept, the
process stays as large as its largest step was.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""From <malloc.h>."""


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)
