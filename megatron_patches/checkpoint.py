"""Change to Megatron's writing of checkpoints: no patch for good, but one that ends with its block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_patches.device import import_quietly

_NO_QUEUE = object()


@contextmanager
def no_process_for_results() -> Iterator[None]:
    """While a write is planned, Megatron starts a process for the queue through which its own writers would answer.
    It is never used here, and outlives a trainer that is killed; within this block an empty object stands for it.

    For megatron-core 0.16.1, filesystem_async. Needed under CUDA too, so it is not one of `PATCHES`.
    """
    module: Any = import_quietly("megatron.core.dist_checkpointing.strategies.filesystem_async")
    before = module._results_queue
    module._results_queue = _NO_QUEUE
    try:
        yield
    finally:
        module._results_queue = before
