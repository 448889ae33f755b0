"""GLM-4.5, 4.6, 4.7 (mixture of experts): grouped-query attention with biases, dense layers first, then layers of
routed and shared experts, then a multi-token-prediction layer. The router is fp32 in SGLang."""

from collections.abc import Mapping
from typing import Any

import torch

from slimerl.resharding.families import blocks
from slimerl.resharding.families.experts import ExpertSizes, moe_layer
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.prediction import prediction_aliases, prediction_layer
from slimerl.resharding.families.table import Block, Table
from slimerl.resharding.layouts import ExpertLocation

DENSE_LAYERS, SHARED_EXPERTS = 1, 1
"""transformers' defaults where config.json has none."""


def _table(config: Mapping[str, Any]) -> Table:
    size = blocks.read_dimensions(config)
    blocks.refuse(config, "glm4_moe", tie_word_embeddings="SGLang's GLM-4.5 has a head of its own")
    sizes = ExpertSizes(
        hidden=size.hidden,
        experts=blocks.read_integer(config, "n_routed_experts", most=blocks.MOST_EXPERTS),
        intermediate=blocks.read_integer(config, "moe_intermediate_size"),
        shared=blocks.read_integer(config, "n_shared_experts", SHARED_EXPERTS),
    )

    def attention(dense: bool, site: blocks.Site = blocks.DECODER) -> Block:
        biased, normed = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
        layer = blocks.attention(size, qkv_bias=biased, qk_norm=normed, site=site)
        return layer + blocks.post_attention_norm(size, dense, site)

    def sparse(site: blocks.Site, location: ExpertLocation) -> Block:
        return attention(False, site) + moe_layer(sizes, location, True, torch.float32, site)

    dense = attention(True) + blocks.gated_mlp(size.hidden, size.intermediate)
    dense_layers = min(blocks.read_integer(config, "first_k_dense_replace", DENSE_LAYERS, least=0), size.layers)
    layers = (dense,) * dense_layers
    layers += (sparse(blocks.DECODER, ExpertLocation.MAPPED),) * (size.layers - dense_layers)
    draft = prediction_layer(config, size.hidden, size.layers, lambda site: sparse(site, ExpertLocation.FIXED))
    aliases = {} if draft is None else prediction_aliases(size.layers)
    return Table(blocks.embedding(size), layers, blocks.head(size), draft, aliases, blocks.HEAD_ON_EVERY_STAGE)


GLM4_MOE = Family("glm4_moe", _table)
