"""What `rollout.oversample` may be beside the rollout's other keys. Flows in: their values. Flows out: a refusal that
names what to set. Invariant: what passes is reached, and leaves no sample that is never trained."""

import math


def check_oversample(factor: float | None, max_staleness: int, on_update: str, chunk_tokens: int | None) -> None:
    """Raises ValueError: it leaves samples that are too stale, is never reached, or stops nothing early."""
    if factor is None or factor == 1:
        return
    ahead = max_staleness + 1
    if max_staleness == 0:
        raise ValueError(
            f"rollout.oversample = {factor:g} leaves partial samples of older weights, and rollout.max_staleness = 0 "
            "trains none of them; set max_staleness to 1, or oversample to 1"
        )
    if factor > ahead:
        raise ValueError(
            f"rollout.oversample = {factor:g} is never reached: rollout.max_staleness = {max_staleness} lets {ahead} "
            f"steps' worth of prompts be under way; raise it to {math.ceil(factor) - 1}, or lower oversample"
        )
    if on_update == "drain" and chunk_tokens is None:
        raise ValueError(
            f"rollout.oversample = {factor:g} stops what is not needed yet at new weights, and rollout.on_update: "
            "drain waits for its end; choose retract, or bound the wait by rollout.chunk_tokens"
        )
