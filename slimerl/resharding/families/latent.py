"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values through narrow latents.

Flows in: sizes read from a config, where the layer hangs. Flows out: a block of a table.
Invariant: the engine's derived `w_kc` and `w_vc` (copies of kv_b_proj) are no parameters and stand in no table; who
writes kv_b_proj past the engine's loader has them rebuilt (`post_load_weights`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimerl.resharding.families.blocks import (
    DECODER,
    ConfigError,
    Site,
    input_norm,
    linear,
    read_integer,
    replicated,
)
from slimerl.resharding.families.cuts import COLUMNS, ROWS
from slimerl.resharding.families.table import Block, Rule, Weight
from slimerl.resharding.layouts import Axis


@dataclass(frozen=True)
class LatentSizes:
    hidden: int
    heads: int
    query_rank: int | None
    """None: queries straight from the hidden state."""
    key_value_rank: int
    nope: int
    """Width of the part of a head without rotary embedding."""
    rope: int
    value: int


def read_latent_sizes(config: Mapping[str, Any]) -> LatentSizes:
    """Raises ConfigError naming the key."""
    if "q_lora_rank" not in config:
        raise ConfigError("config.json: q_lora_rank must be given; null means queries without a latent")
    return LatentSizes(
        hidden=read_integer(config, "hidden_size"),
        heads=read_integer(config, "num_attention_heads"),
        query_rank=None if config["q_lora_rank"] is None else read_integer(config, "q_lora_rank"),
        key_value_rank=read_integer(config, "kv_lora_rank"),
        nope=read_integer(config, "qk_nope_head_dim"),
        rope=read_integer(config, "qk_rope_head_dim"),
        value=read_integer(config, "v_head_dim"),
    )


def latent_attention(sizes: LatentSizes, site: Site = DECODER) -> Block:
    """Input norm and attention. SGLang replicates the down-projections and fuses them, [q_a; kv_a]; both sides cut the
    up-projections by heads. Transformer Engine makes the norm of a latent a part of the up-projection behind it."""
    here, core, there = f"{site.checkpoint}self_attn.", f"{site.megatron}self_attention.", f"{site.engine}self_attn."
    query = sizes.heads * (sizes.nope + sizes.rope)
    latent = ("kv_a_proj_with_mqa", "linear_kv_down_proj", sizes.key_value_rank + sizes.rope)

    def latent_norm(letter: str, width: int) -> Block:
        name = f"{letter}_a_layernorm.weight"
        fused = f"{core}linear_{letter}_up_proj.layer_norm_weight"
        return replicated(here + name, (width,), f"{core}{letter}_layernorm.weight", fused, there + name)

    def by_heads(name: str, megatron: str, rows: int, columns: int) -> Block:
        names = f"{here}{name}.weight", f"{core}{megatron}.weight", f"{there}{name}.weight"
        return linear(names, (rows, columns), ROWS, Axis.ATTENTION)

    block = input_norm(sizes.hidden, site, fused=False)
    if sizes.query_rank is None:
        block += by_heads("q_proj", "linear_q_proj", query, sizes.hidden)
        block += _down(sizes.hidden, (here, core, there), (latent,), "kv_a_proj_with_mqa")
    else:
        down = ("q_a_proj", "linear_q_down_proj", sizes.query_rank)
        block += _down(sizes.hidden, (here, core, there), (down, latent), "fused_qkv_a_proj_with_mqa")
        block += latent_norm("q", sizes.query_rank)
        block += by_heads("q_b_proj", "linear_q_up_proj", query, sizes.query_rank)
    block += latent_norm("kv", sizes.key_value_rank)
    key_value = sizes.heads * (sizes.nope + sizes.value)
    block += by_heads("kv_b_proj", "linear_kv_up_proj", key_value, sizes.key_value_rank)
    output = f"{here}o_proj.weight", f"{core}linear_proj.weight", f"{there}o_proj.weight"
    return block + linear(output, (sizes.hidden, sizes.heads * sizes.value), COLUMNS, Axis.ATTENTION)


def _down(hidden: int, bases: tuple[str, str, str], each: Sequence[tuple[str, str, int]], engine: str) -> Block:
    """Down-projections, each (checkpoint's name, Megatron's name, rows); one parameter `engine` in SGLang."""
    here, core, there = bases
    sources = tuple(f"{here}{name}.weight" for name, _, _ in each)
    return Block(
        weights=tuple(
            Weight(source, (rows, hidden), quantised=True) for source, (_, _, rows) in zip(sources, each, strict=True)
        ),
        megatron=tuple(
            Rule(f"{core}{name}.weight", (source,), ROWS, Axis.LATENT)
            for source, (_, name, _) in zip(sources, each, strict=True)
        ),
        engine=(Rule(f"{there}{engine}.weight", sources, ROWS, Axis.LATENT),),
    )
