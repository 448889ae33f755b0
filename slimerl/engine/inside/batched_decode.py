"""Decode attention on a machine without CUDA as a few calls for the whole batch.

SGLang's `torch_native` backend calls the attention kernel once per request and layer; with 32 requests of a small
model nearly half of a decode step goes there. Here the requests of a batch are padded to few widths and attended
together. The width of a request is a function of its own length, and the kernel computes each row alone.
Invariant: what a request gets does not depend on what else is in the batch, to the last bit.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from slimerl.engine.inside.import_hooks import after_import

WIDTH_STEP = 32
"""Lengths are padded to multiples of this: a batch of 32 requests of 60 to 95 tokens makes one or two groups."""

MAX_GATHERED = 1 << 16
"""Keys of at most that many tokens are copied together (or those of one request): bounds the memory on top."""


class PaddedRequests(NamedTuple):
    """Requests of one padded width."""

    rows: torch.Tensor
    """[requests], which of the batch."""
    slots: torch.Tensor
    """[requests · width], where the keys and values lie in the cache; padding repeats a request's first one."""
    unseen: torch.Tensor
    """[requests, 1, 1, width], 0 or -inf, to be added to the scores."""


def padded_requests(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, dtype: torch.dtype
) -> list[PaddedRequests]:
    """Who is attended together.

    Args:
        req_to_token: [requests of the pool, context], slots of the cache.
        req_pool_indices, seq_lens: [requests of the batch].
    """
    widths = (seq_lens.long() + WIDTH_STEP - 1) // WIDTH_STEP * WIDTH_STEP
    groups = []
    for width in widths.unique().tolist():
        of_width = (widths == width).nonzero().flatten()
        for rows in of_width.split(max(1, MAX_GATHERED // width)):
            columns = torch.arange(width)
            hidden = columns >= seq_lens[rows, None]
            slots = req_to_token[req_pool_indices[rows].long()[:, None], columns.masked_fill(hidden, 0)]
            unseen = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            groups.append(PaddedRequests(rows, slots.flatten(), unseen[:, None, None]))
    return groups


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: PaddedRequests, scale: float | None
) -> torch.Tensor:
    """Attention of one new token each: [requests of the group, heads, value dim].

    Args:
        query: [requests of the batch, heads, dim].
        keys, values: [slots, key heads, dim or value dim].
    """
    requests, heads = len(group.rows), keys.shape[1]
    keys, values = (
        cache.index_select(0, group.slots).to(query.dtype).unflatten(0, (requests, -1)).transpose(1, 2)
        for cache in (keys, values)
    )
    # the query heads that share a key head stand where positions would: no copy of the keys for each of them
    grouped = query.index_select(0, group.rows).unflatten(1, (heads, -1))
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.unseen, scale=scale).flatten(1, 2)


def install_batched_decode() -> None:
    """Hook SGLang's `torch_native` backend; see the module docstring."""
    after_import("sglang.srt.layers.attention.torch_native_backend", _decode_in_batches)


def _decode_in_batches(module: ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    stock_metadata, stock_decode = backend.init_forward_metadata, backend._run_sdpa_forward_decode

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        self.padded_requests = None  # the first layer makes it, the others take the same
        stock_metadata(self, forward_batch)

    def decode(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or sliding_window_size is not None:
            caches = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, scaling)
            return stock_decode(self, query, output, *caches, sliding_window_size=sliding_window_size, **options)
        if self.padded_requests is None:
            self.padded_requests = padded_requests(req_to_token, req_pool_indices, seq_lens, query.dtype)
        for group in self.padded_requests:
            output.index_copy_(0, group.rows, attend(query, k_cache, v_cache, group, scaling))
        return output

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode = decode
