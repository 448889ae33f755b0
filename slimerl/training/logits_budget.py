"""How many logits exist at once: what the log-probabilities keep to, and the memory estimate counts with."""

CHUNK_BYTES = 256 * 2**20
"""Logits computed at once (fp32). Smaller chunks multiply thin matrices and add up the weight's gradient more often."""

KEPT_BYTES = 512 * 2**20
"""Up to this size all chunks are kept for the backward pass; beyond it they are computed again there."""
