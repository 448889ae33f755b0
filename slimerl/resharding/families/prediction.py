"""The multi-token-prediction layer: a layer behind the last one that guesses the token after the next.

Flows in: sizes, a function that makes the block of a decoder layer. Flows out: a block, the same weights in Megatron's
MTP block and in SGLang's NextN draft model.
Invariant: embedding and head are the model's own. Megatron's stage with this layer has a copy of the embedding, whose
owner is the first stage; the draft model shares the engine's tensors; a checkpoint's copies are aliases.
"""

from collections.abc import Callable, Mapping
from typing import Any

from slimerl.resharding.families.blocks import EMBEDDING, ConfigError, Site, read_integer, replicated
from slimerl.resharding.families.cuts import ROWS, Vocabulary
from slimerl.resharding.families.table import DRAFT, Block, Rule, Weight
from slimerl.resharding.layouts import Axis


def prediction_layer(
    config: Mapping[str, Any], hidden: int, layers: int, decoder_layer: Callable[[Site], Block]
) -> Block | None:
    """None where config.json says that there is none. Raises ConfigError for more than one: SGLang's draft has one."""
    count = read_integer(config, "num_nextn_predict_layers", 0, least=0)
    if count > 1:
        raise ConfigError(f"config.json: num_nextn_predict_layers = {count}; SGLang's draft model has 1 layer")
    if count == 0:
        return None
    # The checkpoint counts it as one more layer. The names are spelled out: there is one such layer.
    here, core, there = f"model.layers.{layers}.", "mtp.layers.0.", f"{DRAFT}model."

    def norm(name: str, megatron: str) -> Block:
        return replicated(f"{here}{name}.weight", (hidden,), f"{core}{megatron}.weight", engine=f"{there}{name}.weight")

    name = "eh_proj.weight"
    block = norm("enorm", "enorm") + norm("hnorm", "hnorm")
    block += Block(
        weights=(Weight(here + name, (hidden, 2 * hidden)),),
        megatron=(
            Rule(core + name, (here + name,), ROWS, Axis.DENSE),
            Rule("embedding.word_embeddings.weight", (EMBEDDING,), Vocabulary(), Axis.EMBEDDING, only_apart=True),
        ),
        engine=(Rule(there + name, (here + name,), ROWS, Axis.NONE),),
    )
    block += decoder_layer(Site(here, f"{core}transformer_layer.", f"{there}decoder."))
    return block + norm("shared_head.norm", "final_layernorm")


def prediction_aliases(layers: int) -> dict[str, str]:
    """What checkpoints carry a second time in that layer."""
    here = f"model.layers.{layers}."
    return {f"{here}embed_tokens.weight": EMBEDDING, f"{here}shared_head.head.weight": "lm_head.weight"}
