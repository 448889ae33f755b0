"""Imports of large libraries, without what Python's collector adds to them.

Each full collection looks through everything that lives, and an import of torch, transformers or SGLang makes a million
objects of which nearly all live on: a quarter of the time that a role takes to start.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Nothing is collected within the block; what lives at its end is left out of every collection from then on, and a
    process that is forked then shares it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
