"""Llama and its relatives of the same shape (Llama 2 and 3, SmolLM2)."""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import blocks
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.table import Table


def _table(config: Mapping[str, Any]) -> Table:
    size = blocks.read_dimensions(config)
    blocks.refuse(
        config,
        "llama",
        attention_bias="megatron-core has no bias on the attention output alone",
        mlp_bias="SGLang's Llama has no MLP bias",
    )
    layer = blocks.attention(size)
    layer += blocks.post_attention_norm(size, dense=True) + blocks.gated_mlp(size.hidden, size.intermediate)
    unplanned = blocks.HEAD_ON_EVERY_STAGE | blocks.ATTENTION_OVER_CONTEXT
    return Table(blocks.embedding(size), (layer,) * size.layers, blocks.head(size), unplanned=unplanned)


LLAMA = Family("llama", _table)
