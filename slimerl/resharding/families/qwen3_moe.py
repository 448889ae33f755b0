"""Qwen3-MoE: Qwen3's attention, and routed experts in every layer."""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import blocks
from slimerl.resharding.families.experts import ExpertSizes, moe_layer
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.table import Table
from slimerl.resharding.layouts import ExpertLocation


def _table(config: Mapping[str, Any]) -> Table:
    size = blocks.read_dimensions(config)
    blocks.refuse(
        config,
        "qwen3_moe",
        attention_bias="megatron-core has no bias on the attention output alone",
        mlp_only_layers="SGLang's Qwen3-MoE has experts in every layer",
        tie_word_embeddings="SGLang's Qwen3-MoE has a head of its own",
    )
    if blocks.read_integer(config, "decoder_sparse_step", 1) != 1:
        raise blocks.ConfigError(
            f"config.json: decoder_sparse_step = {config['decoder_sparse_step']} is not supported for qwen3_moe: "
            "SGLang's Qwen3-MoE has experts in every layer"
        )
    # transformers 5 writes the second name.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    count = blocks.read_integer(config, key, most=blocks.MOST_EXPERTS)
    layer = blocks.attention(size, qk_norm=True) + blocks.post_attention_norm(size, dense=False)
    sizes = ExpertSizes(size.hidden, count, blocks.read_integer(config, "moe_intermediate_size"))
    layer += moe_layer(sizes, ExpertLocation.COPIED, bias=False)
    layers = (layer,) * size.layers
    return Table(blocks.embedding(size), layers, blocks.head(size), unplanned=blocks.HEAD_ON_EVERY_STAGE)


QWEN3_MOE = Family("qwen3_moe", _table)
