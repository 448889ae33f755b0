"""When Python's collector looks through everything that lives.

With ten thousand conversations under way a full collection stops the event loop for tenths of a second, and by itself
it comes at any time. So what has been loaded is left out of it for good, and the rest is looked through when nobody
waits for this process: while requests are held for new weights. Young objects are collected as ever.
"""

import asyncio
import gc
import logging
import time

logger = logging.getLogger(__name__)

NEVER = 1_000_000_000
YOUNG, MIDDLE = 5_000, 3
"""Objects, and collections of young ones. One answer of an engine is hundreds of lists, nearly all of which are gone
before so many have come; what is looked through at once stays a matter of milliseconds."""
AFTER_S = 0.05
"""Whoever asked for the hold is answered first."""


def defer_full_collections() -> None:
    """From now on they come by `collect_soon` alone."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


def collect_soon() -> None:
    """Once what is to be done at once is done."""
    asyncio.get_running_loop().call_later(AFTER_S, _collect)


def _collect() -> None:
    begun = time.monotonic()
    found = gc.collect()
    logger.debug("a full collection of %d objects took %.3f s", found, time.monotonic() - begun)
