"""Small models and random layouts for the planner's tests."""

from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from slimerl.resharding.families.family import PLAIN, Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import PlanOptions, SyncShape, Topology

BLOCK = 4

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 75,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
TIED = DENSE | {"model_type": "llama", "tie_word_embeddings": True}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 75,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
MODELS = {"dense": DENSE, "tied": TIED, "moe": MOE, "deepseek": DEEPSEEK}
FINE = PlanOptions(operations_per_nic=60, least_parcel_bytes=64, granule_rows=4)
"""Small models still make many parcels, and split tensors."""


@st.composite
def trainers(draw: st.DrawFn, config: dict[str, Any]) -> MegatronLayout:
    pipeline = draw(st.sampled_from([1, 2, 3]))
    layers = config["num_hidden_layers"]
    stages = None
    if pipeline == 2:
        first = draw(st.integers(1, layers - 1))
        stages = ((first, layers - first),)
    experts = config.get("num_experts", config.get("n_routed_experts", 1))
    tensor, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    expert = draw(st.sampled_from([n for n in (1, 2, 4) if experts % n == 0 and tensor * data % n == 0]))
    expert_tensor = draw(st.sampled_from([n for n in (1, 2, 4) if tensor * data % (expert * n) == 0]))
    return MegatronLayout(
        tensor, data, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, stage_layers=stages
    )


@st.composite
def engines(draw: st.DrawFn, config: dict[str, Any]) -> EngineLayout:
    experts = config.get("num_experts", config.get("n_routed_experts", 1))
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 8) if experts % n == 0 and tensor % n == 0]))
    data = draw(st.sampled_from([n for n in (1, 2, 4) if tensor % n == 0]))
    whole = draw(st.booleans())
    return EngineLayout(tensor, expert, data, replicated_dense=whole, replicated_shared=whole)


@st.composite
def shapes(draw: st.DrawFn) -> SyncShape:
    """Any model on any small layout, with all kinds of nodes, some engines dead."""
    name = draw(st.sampled_from(sorted(MODELS)))
    config = MODELS[name]
    train, engine = draw(trainers(config)), draw(engines(config))
    form = PLAIN
    if name == "deepseek":
        scales = BlockScales(BLOCK) if draw(st.booleans()) else None
        form = Form(prediction=draw(st.booleans()), scales=scales)
        assume(scales is None or (engine.tensor <= 4 and not train.split_latent))
    gpus = draw(st.sampled_from([1, 2, 4, 8]))
    replicas = draw(st.integers(1, 5))
    dead = draw(st.sets(st.integers(0, replicas - 1), max_size=replicas - 1))
    options = PlanOptions(
        operations_per_nic=draw(st.sampled_from([20, 60, 300])),
        least_parcel_bytes=draw(st.sampled_from([64, 1024])),
        granule_rows=BLOCK,
        windows=draw(st.sampled_from([1, 2, 3])),
        shortest_ring=draw(st.sampled_from([1, 2])),
    )
    topology = Topology(train.world_size, engine.world_size, replicas, gpus, dead=frozenset(dead))
    return SyncShape(config, train, engine, topology, torch.bfloat16, form, options)
