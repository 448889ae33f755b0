"""Building blocks that the families share. Sources of the names: SGLang 0.5.23, megatron-core 0.16.1, transformers 5.

Flows in: sizes read from a config (`Dimensions`). Flows out: blocks of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimerl.resharding.families.cuts import COLUMNS, ROWS, HeadsByKind, QueryGroups, Vocabulary
from slimerl.resharding.families.table import Block, Rule, Weight
from slimerl.resharding.layouts import Axis

LAYER = "model.layers.{layer}."
MCORE_LAYER = "decoder.layers.{layer}."
EMBEDDING = "model.embed_tokens.weight"


class ConfigError(ValueError):
    """A model configuration lacks something, or asks for something that a table does not have."""


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


def read_integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of `config`; `default` where it is absent or null. Raises ConfigError naming the key."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive integer, not {value!r}")
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
        layers=read_integer(config, "num_hidden_layers"),
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


def replicated(name: str, shape: tuple[int, ...], megatron: str, transformer_engine: str | None = None) -> Block:
    """A weight that every rank holds whole (norms, routers); SGLang keeps the checkpoint's name."""
    return Block(
        weights=(Weight(name, shape),),
        megatron=(Rule(megatron, (name,), ROWS, Axis.NONE, transformer_engine),),
        engine=(Rule(name, (name,), ROWS, Axis.NONE),),
    )


def head(size: Dimensions) -> Block:
    """Final norm and output layer. Tied: no weight of its own; the owner is the embedding, and the last pipeline
    stage, where it is not the first, has a copy."""
    final = replicated("model.norm.weight", (size.hidden,), "decoder.final_layernorm.weight")
    if size.tied:
        copy = Rule("output_layer.weight", (EMBEDDING,), Vocabulary(), Axis.HEAD, only_apart=True)
        return final + Block(megatron=(copy,))
    name = "lm_head.weight"
    return final + Block(
        weights=(Weight(name, (size.vocabulary, size.hidden)),),
        megatron=(Rule("output_layer.weight", (name,), Vocabulary(), Axis.HEAD),),
        engine=(Rule(name, (name,), Vocabulary(), Axis.HEAD),),
    )


def attention(size: Dimensions, qkv_bias: bool = False, qk_norm: bool = False) -> Block:
    """Input norm and grouped-query attention: q, k, v fused on both sides, each in its own order."""
    here, core = f"{LAYER}self_attn.", f"{MCORE_LAYER}self_attention."
    rows = {"q": size.heads * size.head_dim, "k": size.kv_heads * size.head_dim, "v": size.kv_heads * size.head_dim}
    groups = QueryGroups(size.heads, size.kv_heads)
    by_kind = HeadsByKind(size.heads, size.kv_heads)
    block = replicated(
        f"{LAYER}input_layernorm.weight",
        (size.hidden,),
        f"{MCORE_LAYER}input_layernorm.weight",
        f"{core}linear_qkv.layer_norm_weight",
    )
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        names = tuple(f"{here}{letter}_proj.{kind}" for letter in rows)
        columns = (size.hidden,) if kind == "weight" else ()
        block += Block(
            weights=tuple(Weight(name, (count, *columns)) for name, count in zip(names, rows.values(), strict=True)),
            megatron=(Rule(f"{core}linear_qkv.{kind}", names, groups, Axis.ATTENTION),),
            engine=(Rule(f"{here}qkv_proj.{kind}", names, by_kind, Axis.ATTENTION),),
        )
    output = f"{here}o_proj.weight"
    block += Block(
        weights=(Weight(output, (size.hidden, rows["q"])),),
        megatron=(Rule(f"{core}linear_proj.weight", (output,), COLUMNS, Axis.ATTENTION),),
        engine=(Rule(output, (output,), COLUMNS, Axis.ATTENTION),),
    )
    if qk_norm:
        for letter in ("q", "k"):
            block += replicated(f"{here}{letter}_norm.weight", (size.head_dim,), f"{core}{letter}_layernorm.weight")
    return block


def post_attention_norm(size: Dimensions, dense: bool) -> Block:
    """The norm before the MLP; Transformer Engine fuses it with a dense MLP, not with experts."""
    return replicated(
        f"{LAYER}post_attention_layernorm.weight",
        (size.hidden,),
        f"{MCORE_LAYER}pre_mlp_layernorm.weight",
        f"{MCORE_LAYER}mlp.linear_fc1.layer_norm_weight" if dense else None,
    )


def gated_mlp(hidden: int, intermediate: int, here: str = "mlp.", core: str = "mlp.") -> Block:
    """Gated MLP without biases: [gate; up] of the rank's part on both sides."""
    gate, up, down = (f"{LAYER}{here}{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return Block(
        weights=(
            Weight(gate, (intermediate, hidden)),
            Weight(up, (intermediate, hidden)),
            Weight(down, (hidden, intermediate)),
        ),
        megatron=(
            Rule(f"{MCORE_LAYER}{core}linear_fc1.weight", (gate, up), ROWS, Axis.DENSE),
            Rule(f"{MCORE_LAYER}{core}linear_fc2.weight", (down,), COLUMNS, Axis.DENSE),
        ),
        engine=(
            Rule(f"{LAYER}{here}gate_up_proj.weight", (gate, up), ROWS, Axis.DENSE),
            Rule(down, (down,), COLUMNS, Axis.DENSE),
        ),
    )


def routed_experts(size: Dimensions, experts: int, intermediate: int) -> Block:
    """Router and gated experts. SGLang stacks the rank's experts: w13 is [gate; up] of each, w2 its down-projection."""
    here, core = f"{LAYER}mlp.", f"{MCORE_LAYER}mlp."
    gate, up, down = (f"{here}experts.{{expert}}.{kind}_proj.weight" for kind in ("gate", "up", "down"))
    local = f"{core}experts.local_experts.{{expert}}."
    grouped = f"{core}experts."
    return replicated(f"{here}gate.weight", (experts, size.hidden), f"{core}router.weight") + Block(
        weights=(
            Weight(gate, (intermediate, size.hidden), experts=experts),
            Weight(up, (intermediate, size.hidden), experts=experts),
            Weight(down, (size.hidden, intermediate), experts=experts),
        ),
        megatron=(
            Rule(
                f"{local}linear_fc1.weight",
                (gate, up),
                ROWS,
                Axis.EXPERT,
                f"{grouped}linear_fc1.weight{{expert}}",
                experts=experts,
            ),
            Rule(
                f"{local}linear_fc2.weight",
                (down,),
                COLUMNS,
                Axis.EXPERT,
                f"{grouped}linear_fc2.weight{{expert}}",
                experts=experts,
            ),
        ),
        engine=(
            Rule(f"{here}experts.w13_weight", (gate, up), ROWS, Axis.EXPERT, experts=experts, stacked=True),
            Rule(f"{here}experts.w2_weight", (down,), COLUMNS, Axis.EXPERT, experts=experts, stacked=True),
        ),
    )
