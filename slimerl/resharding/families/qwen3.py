"""Qwen3, dense: Llama with norms on the q and k heads, whose width stands apart from the hidden size."""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import blocks
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.table import Table

HEAD_DIM = 128
"""transformers' default where config.json has none."""


def _table(config: Mapping[str, Any]) -> Table:
    size = blocks.read_dimensions(config, head_dim=HEAD_DIM)
    blocks.refuse(config, "qwen3", attention_bias="megatron-core has no bias on the attention output alone")
    layer = blocks.attention(size, qk_norm=True)
    layer += blocks.post_attention_norm(size, dense=True) + blocks.gated_mlp(size.hidden, size.intermediate)
    return Table(blocks.embedding(size), (layer,) * size.layers, blocks.head(size))


QWEN3 = Family("qwen3", _table)
