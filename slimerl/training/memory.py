"""Memory that was used once is used again: glibc's allocator, told to keep more of it, and what to give back.

A training step frees and allocates the same tensors over and over. By default each larger one goes back to the kernel,
which fills new pages with zeros, one fault for every 4 KiB: measured, 4 % of a step of a 135M-parameter model. Tensors
up to `KEPT_BYTES` are kept; larger ones (logits) are not.

The packs of each step have other sizes than the last, and between them lie the kernels that are kept for some
(`resilience.kernel_caches`), scattered over the heap: holes that the next sizes do not fit into make what a step
touches spread, a little with every step of other sizes. `FreedMemory` gives them back where they have become more than
a few per cent, so that a trainer holds after a thousand steps what it held after ten.
"""

import ctypes
from collections.abc import Callable

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""

KEPT_BYTES = 32 * 2**20
"""The largest threshold that glibc takes on a 64-bit machine."""

FREE_BYTES = 512 * 2**20
"""Free memory at the end of the heap that is kept."""

SPREAD = 1.03
"""Resident memory against that of the first step after freed memory was given back. Measured with the quickstart's
model, every few steps: 10 ms to give it back, and 60 ms for the page faults of the step after."""


def keep_freed_memory() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)


def _trim_heap() -> None:
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()


class FreedMemory:
    """Goes back to the kernel where it has spread: what lies between the kernels and tensors that are kept.

    Args of the constructor:
        resident: tells the bytes that this process holds.
        give_back: what is free of them. Does nothing where the C library is not known.
    """

    def __init__(
        self,
        resident: Callable[[], int] = lambda: psutil.Process().memory_info().rss,
        give_back: Callable[[], object] = _trim_heap,
    ) -> None:
        self._resident, self._give_back = resident, give_back
        self._usual: int | None = None

    def after_step(self) -> None:
        """Look, and give back what is free where this process has grown by `SPREAD` since the first step after that."""
        resident = self._resident()
        if self._usual is None:
            self._usual = resident
        elif resident > SPREAD * self._usual:
            self._give_back()
            self._usual = None
