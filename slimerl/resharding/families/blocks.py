"""Building blocks that the families share. Sources of the names: SGLang 0.5.23, megatron-core 0.16.1, transformers 5.

Flows in: sizes read from a config (`Dimensions`). Flows out: blocks of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimerl.resharding.families.cuts import COLUMNS, ROWS, Cut, HeadsByKind, QueryGroups, Vocabulary
from slimerl.resharding.families.table import Block, Rule, Weight
from slimerl.resharding.layouts import Axis

EMBEDDING = "model.embed_tokens.weight"

LARGEST_INTEGER = 2**31 - 1
"""What sizes are in Megatron's kernels."""
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
"""Of a layer. Beyond what anyone trains: every layer and expert has lines in tables, so a slip of the pen is refused
before they fill the memory."""

HEAD_ON_EVERY_STAGE = {"pipeline": "SGLang's model has the output layer on every stage, not on the last alone"}
ATTENTION_OVER_CONTEXT = {"context_attention": "SGLang's model cuts attention over ranks that share a sequence, too"}
"""What `Table.unplanned` says of several families."""


class ConfigError(ValueError):
    """A model configuration lacks something, or asks for something that a table does not have."""


@dataclass(frozen=True)
class Site:
    """Where a layer hangs: what stands before the names of its modules, on each side."""

    checkpoint: str
    megatron: str
    engine: str


DECODER = Site("model.layers.{layer}.", "decoder.layers.{layer}.", "model.layers.{layer}.")


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a decoder with grouped-query attention; `intermediate` is the width of its dense MLP."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool


def read_integer(
    config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = LARGEST_INTEGER
) -> int:
    """An integer of `config` in [least, most]; `default` where it is absent or null. Raises ConfigError."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ConfigError(f"config.json: {key} must be {kind}, not {value!r}")
    if value > most:
        shown = value if value < 10**20 else "a number of more than 20 digits"
        raise ConfigError(f"config.json: {key} = {shown} is more than any model has, at most {most}; correct it")
    return value


def read_dimensions(config: Mapping[str, Any], head_dim: int | None = None) -> Dimensions:
    """The keys that all families share; `head_dim` is the family's default, None for hidden / heads."""
    hidden, heads = read_integer(config, "hidden_size"), read_integer(config, "num_attention_heads")
    kv_heads = read_integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return Dimensions(
        vocabulary=read_integer(config, "vocab_size"),
        hidden=hidden,
        layers=read_integer(config, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read_integer(config, "head_dim", head_dim or hidden // heads),
        intermediate=read_integer(config, "intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def refuse(config: Mapping[str, Any], family: str, **keys: str) -> None:
    """Raises ConfigError where one of `keys` is set; the value says why the table does not have it."""
    for key, why in keys.items():
        if config.get(key):
            raise ConfigError(f"config.json: {key} = {config[key]!r} is not supported for {family}: {why}")


def embedding(size: Dimensions) -> Block:
    """Token embedding, rows over the vocabulary."""
    return Block(
        weights=(Weight(EMBEDDING, (size.vocabulary, size.hidden)),),
        megatron=(Rule("embedding.word_embeddings.weight", (EMBEDDING,), Vocabulary(), Axis.EMBEDDING),),
        engine=(Rule(EMBEDDING, (EMBEDDING,), Vocabulary(), Axis.EMBEDDING),),
    )


def replicated(
    name: str,
    shape: tuple[int, ...],
    megatron: str,
    transformer_engine: str | None = None,
    engine: str | None = None,
    dtype: torch.dtype | None = None,
    widened: bool = False,
) -> Block:
    """A weight that every rank holds whole (norms, routers); `engine`: SGLang's name if not the checkpoint's."""
    return Block(
        weights=(Weight(name, shape, dtype, widened=widened),),
        megatron=(Rule(megatron, (name,), ROWS, Axis.NONE, transformer_engine),),
        engine=(Rule(engine or name, (name,), ROWS, Axis.NONE),),
    )


def head(size: Dimensions) -> Block:
    """Final norm and output layer. Tied: no weight of its own; the owner is the embedding, and the last pipeline
    stage, where it is not the first, has a copy."""
    norm = "model.norm.weight"
    final = Block(
        weights=(Weight(norm, (size.hidden,)),),
        megatron=(Rule("decoder.final_layernorm.weight", (norm,), ROWS, Axis.NONE, after_layers=True),),
        engine=(Rule(norm, (norm,), ROWS, Axis.NONE),),
    )
    if size.tied:
        copy = Rule("output_layer.weight", (EMBEDDING,), Vocabulary(), Axis.HEAD, only_apart=True)
        return final + Block(megatron=(copy,))
    name = "lm_head.weight"
    return final + Block(
        weights=(Weight(name, (size.vocabulary, size.hidden)),),
        megatron=(Rule("output_layer.weight", (name,), Vocabulary(), Axis.HEAD),),
        engine=(Rule(name, (name,), Vocabulary(), Axis.HEAD),),
    )


def linear(names: tuple[str, str, str], shape: tuple[int, int], cut: Cut, axis: Axis) -> Block:
    """One matrix that is a parameter of its own on both sides; `names` in checkpoint, Megatron, engine."""
    checkpoint, megatron, engine = names
    return Block(
        weights=(Weight(checkpoint, shape, quantised=True),),
        megatron=(Rule(megatron, (checkpoint,), cut, axis),),
        engine=(Rule(engine, (checkpoint,), cut, axis),),
    )


def attention(size: Dimensions, qkv_bias: bool = False, qk_norm: bool = False, site: Site = DECODER) -> Block:
    """Input norm and grouped-query attention: q, k, v fused on both sides, each in its own order."""
    here, core, there = f"{site.checkpoint}self_attn.", f"{site.megatron}self_attention.", f"{site.engine}self_attn."
    rows = {"q": size.heads * size.head_dim, "k": size.kv_heads * size.head_dim, "v": size.kv_heads * size.head_dim}
    groups = QueryGroups(size.heads, size.kv_heads)
    by_kind = HeadsByKind(size.heads, size.kv_heads)
    block = input_norm(size.hidden, site, fused=True)
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        names = tuple(f"{here}{letter}_proj.{kind}" for letter in rows)
        columns = (size.hidden,) if kind == "weight" else ()
        block += Block(
            weights=tuple(
                Weight(name, (count, *columns), quantised=kind == "weight")
                for name, count in zip(names, rows.values(), strict=True)
            ),
            megatron=(Rule(f"{core}linear_qkv.{kind}", names, groups, Axis.ATTENTION),),
            engine=(Rule(f"{there}qkv_proj.{kind}", names, by_kind, Axis.ATTENTION),),
        )
    output = (f"{here}o_proj.weight", f"{core}linear_proj.weight", f"{there}o_proj.weight")
    block += linear(output, (size.hidden, rows["q"]), COLUMNS, Axis.ATTENTION)
    if qk_norm:
        for letter in ("q", "k"):
            name = f"{letter}_norm.weight"
            block += replicated(here + name, (size.head_dim,), f"{core}{letter}_layernorm.weight", engine=there + name)
    return block


def input_norm(hidden: int, site: Site, fused: bool) -> Block:
    """The norm before attention; `fused`: Transformer Engine makes it a part of linear_qkv."""
    name = "input_layernorm.weight"
    return replicated(
        site.checkpoint + name,
        (hidden,),
        site.megatron + name,
        f"{site.megatron}self_attention.linear_qkv.layer_norm_weight" if fused else None,
        site.engine + name,
    )


def post_attention_norm(size: Dimensions, dense: bool, site: Site = DECODER) -> Block:
    """The norm before the MLP; Transformer Engine fuses it with a dense MLP, not with experts."""
    name = "post_attention_layernorm.weight"
    return replicated(
        site.checkpoint + name,
        (size.hidden,),
        f"{site.megatron}pre_mlp_layernorm.weight",
        f"{site.megatron}mlp.linear_fc1.layer_norm_weight" if dense else None,
        site.engine + name,
    )


def gated_mlp(hidden: int, intermediate: int, site: Site = DECODER) -> Block:
    """Gated MLP without biases: [gate; up] of the rank's part on both sides."""
    here, core, there = f"{site.checkpoint}mlp.", f"{site.megatron}mlp.", f"{site.engine}mlp."
    gate, up = f"{here}gate_proj.weight", f"{here}up_proj.weight"
    return Block(
        weights=(
            Weight(gate, (intermediate, hidden), quantised=True),
            Weight(up, (intermediate, hidden), quantised=True),
        ),
        megatron=(Rule(f"{core}linear_fc1.weight", (gate, up), ROWS, Axis.DENSE),),
        engine=(Rule(f"{there}gate_up_proj.weight", (gate, up), ROWS, Axis.DENSE),),
    ) + linear(
        (f"{here}down_proj.weight", f"{core}linear_fc2.weight", f"{there}down_proj.weight"),
        (hidden, intermediate),
        COLUMNS,
        Axis.DENSE,
    )
