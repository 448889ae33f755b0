"""Packs for Transformer Engine's attention (THD): whole sequences, told by where each starts.

Flows in: lengths. Flows out: Megatron's `PackedSeqParams` and which tokens this rank has. Invariant: under context
parallelism each sequence, padded to a multiple of 2·context, is cut into 2·context chunks, of which rank r has
chunks r and 2·context - 1 - r: the cut that Transformer Engine's attention and Megatron's rotary embedding expect.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slimerl.training.segments import Laid, Stripes


def lay_sequences(lengths: Sequence[int], tensor: int, stripes: Stripes, device: torch.device | str) -> Laid:
    """Lay out sequences one after the other.

    Args:
        tensor: each rank's part must be a multiple of it. What is missing is padded by a sequence of its own.
    """
    chunks = 2 * stripes.size if stripes.size > 1 else 1
    padded = [-(-length // chunks) * chunks for length in lengths]
    sequences = len(lengths)
    rest = -sum(padded) % (chunks * tensor)
    if rest or not padded:
        padded, lengths = [*padded, rest or chunks * tensor], [*lengths, rest or chunks * tensor]
    starts = np.concatenate([[0], np.cumsum(padded)])
    where = [start + np.arange(length) for start, length in zip(starts, lengths, strict=False)][:sequences]
    real_bounds = np.concatenate([[0], np.cumsum(lengths)])
    longest = max(padded)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=_bounds(real_bounds, device),
        cu_seqlens_kv=_bounds(real_bounds, device),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if chunks > 1:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = _bounds(starts, device)
    return Laid(
        int(starts[-1]), np.concatenate([np.empty(0, dtype=np.int64), *where]), _own(starts, stripes, chunks), packed
    )


def _own(starts: np.ndarray, stripes: Stripes, chunks: int) -> np.ndarray:
    if chunks == 1:
        return np.arange(starts[-1])
    mine = (stripes.rank, chunks - 1 - stripes.rank)
    return np.concatenate(
        [np.split(np.arange(start, stop), chunks)[chunk] for start, stop in pairwise(starts) for chunk in mine]
    )


def _bounds(bounds: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(bounds.astype(np.int32)).to(device)
