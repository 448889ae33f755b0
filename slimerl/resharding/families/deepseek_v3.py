"""DeepSeek-V3 and R1, and what has their shape (Kimi-K2, Moonlight): latent attention, dense layers first, then layers
of routed and shared experts, then a multi-token-prediction layer."""

from collections.abc import Mapping
from typing import Any

from slimerl.resharding.families import blocks
from slimerl.resharding.families.experts import ExpertSizes, moe_layer
from slimerl.resharding.families.family import Family
from slimerl.resharding.families.latent import latent_attention, read_latent_sizes
from slimerl.resharding.families.prediction import prediction_aliases, prediction_layer
from slimerl.resharding.families.table import Block, Table
from slimerl.resharding.layouts import ExpertLocation

DENSE_LAYERS, SHARED_EXPERTS = 3, 1
"""transformers' defaults where config.json has none."""


def _table(config: Mapping[str, Any]) -> Table:
    latent = read_latent_sizes(config)
    size = blocks.read_dimensions(config, head_dim=latent.nope + latent.rope)
    blocks.refuse(
        config,
        str(config["model_type"]),
        attention_bias="SGLang's DeepSeek has no attention biases",
        tie_word_embeddings="no model of this shape ties its head",
    )
    _require(config, "moe_layer_freq", 1, "SGLang's DeepSeek-V3 has experts in every layer after the dense ones")
    _require(config, "topk_method", "noaux_tc", "without it the router has no correction bias")
    sizes = ExpertSizes(
        hidden=size.hidden,
        experts=blocks.read_integer(config, "n_routed_experts", most=blocks.MOST_EXPERTS),
        intermediate=blocks.read_integer(config, "moe_intermediate_size"),
        shared=blocks.read_integer(config, "n_shared_experts", SHARED_EXPERTS, least=0),
    )

    def sparse(site: blocks.Site, location: ExpertLocation) -> Block:
        layer = latent_attention(latent, site) + blocks.post_attention_norm(size, dense=False, site=site)
        return layer + moe_layer(sizes, location, bias=True, site=site)

    dense = latent_attention(latent) + blocks.post_attention_norm(size, dense=True)
    dense += blocks.gated_mlp(size.hidden, size.intermediate)
    dense_layers = min(blocks.read_integer(config, "first_k_dense_replace", DENSE_LAYERS, least=0), size.layers)
    layers = (dense,) * dense_layers
    layers += (sparse(blocks.DECODER, ExpertLocation.COPIED),) * (size.layers - dense_layers)
    draft = prediction_layer(config, size.hidden, size.layers, lambda site: sparse(site, ExpertLocation.FIXED))
    aliases = {} if draft is None else prediction_aliases(size.layers)
    return Table(blocks.embedding(size), layers, blocks.head(size), draft, aliases)


def _require(config: Mapping[str, Any], key: str, value: object, why: str) -> None:
    if config.get(key, value) != value:
        raise blocks.ConfigError(
            f"config.json: {key} = {config[key]!r} is not supported for {config['model_type']}, only {value!r}: {why}"
        )


DEEPSEEK_V3 = Family("deepseek_v3", _table)
KIMI_K2 = Family("kimi_k2", _table)
