"""Qwen2 and Qwen2.5, dense: Llama with a bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import blocks
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.table import Table


def _table(config: Mapping[str, Any]) -> Table:
    size = blocks.read_dimensions(config)
    layer = blocks.attention(size, qkv_bias=True)
    layer += blocks.post_attention_norm(size, dense=True) + blocks.gated_mlp(size.hidden, size.intermediate)
    layers = (layer,) * size.layers
    return Table(blocks.embedding(size), layers, blocks.head(size), unplanned=blocks.ATTENTION_OVER_CONTEXT)


QWEN2 = Family("qwen2", _table)
