"""Small models of every family, and random layouts for them."""

import itertools
from typing import Any

import torch
from hypothesis import strategies as st

from slimerl.resharding.families.family import PLAIN, Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames
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
LATENT_KEYS = [key for key in DEEPSEEK if "lora" in key or key.endswith("_head_dim")]
GLM = {key: value for key, value in DEEPSEEK.items() if key not in LATENT_KEYS} | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 4,
    "attention_bias": True,
    "use_qk_norm": True,
}
MODELS = {"dense": DENSE, "tied": TIED, "moe": MOE, "deepseek": DEEPSEEK}
FAMILIES = {
    "llama": DENSE | {"model_type": "llama"},
    "qwen2": DENSE | {"model_type": "qwen2"},
    "qwen3": DENSE,
    "qwen3_moe": MOE,
    "glm4_moe": GLM,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK | {"model_type": "kimi_k2"},
}
FINE = PlanOptions(operations_per_nic=60, least_parcel_bytes=64, granule_rows=4)
"""Small models still make many parcels, and split tensors."""


@st.composite
def models(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A config.json of the family."""
    config = FAMILIES[family] | {
        "vocab_size": draw(st.sampled_from([64, 75, 129])),
        "num_hidden_layers": draw(st.integers(2, 4)),
    }
    if "head_dim" in config:
        config["num_key_value_heads"] = draw(st.sampled_from([1, 2, 4, 8]))
    if family in ("llama", "qwen2", "qwen3"):
        config["tie_word_embeddings"] = draw(st.booleans())
    if "n_shared_experts" in config:
        config["n_shared_experts"] = draw(st.sampled_from([1, 1, 2]))
        config["first_k_dense_replace"] = draw(st.integers(0, 2))
    if "q_lora_rank" in config:
        config["q_lora_rank"] = draw(st.sampled_from([8, 8, None]))
    return config


def experts_of(config: dict[str, Any]) -> int:
    return int(config.get("num_experts", config.get("n_routed_experts", 1)))


@st.composite
def trainers(draw: st.DrawFn, config: dict[str, Any], prediction: bool = False) -> MegatronLayout:
    """Uneven and virtual pipelines, expert parallelism of its own sizes, context and data replicas."""
    tensor, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    context = draw(st.sampled_from([1, 1, 2]))
    pipeline = draw(st.sampled_from([1, 2, 3]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    chunks, layers = pipeline * virtual, config["num_hidden_layers"]
    stages = None
    if layers % chunks or draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
        counts = [after - before for before, after in itertools.pairwise([0, *cuts, layers])]
        stages = tuple(tuple(counts[chunk * pipeline : (chunk + 1) * pipeline]) for chunk in range(virtual))
    ranks = tensor * data * context
    expert = draw(st.sampled_from([n for n in (1, 2, 4) if experts_of(config) % n == 0 and ranks % n == 0]))
    inside = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % (expert * n) == 0]))
    return MegatronLayout(
        tensor,
        data,
        context,
        pipeline,
        virtual,
        expert,
        inside,
        stages,
        vocabulary_multiple=draw(st.sampled_from([1, 8])),
        names=draw(st.sampled_from(list(ModuleNames))),
        prediction_stage=draw(st.sampled_from([None, *range(pipeline)])) if prediction else None,
        split_latent=draw(st.booleans()),
    )


def _divisors(whole: int, *sizes: int) -> list[int]:
    return [n for n in sizes if whole % n == 0]


@st.composite
def engines(draw: st.DrawFn, config: dict[str, Any], prediction: bool = False) -> EngineLayout:
    """Of all kinds that SGLang has for the family."""
    experts, family = experts_of(config), config["model_type"]
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    data = draw(st.sampled_from(_divisors(tensor, 1, 2, 4)))
    expert = draw(st.sampled_from([n for n in _divisors(tensor, 1, 2, 4, 8) if experts % n == 0]))
    context = 1 if family in ("llama", "qwen2") else draw(st.sampled_from(_divisors(tensor // data, 1, 1, 2)))
    copies = draw(st.sampled_from(_divisors(tensor // expert, 1, 1, 2))) if experts > 1 else 1
    planned = family in ("qwen2", "qwen3", "deepseek_v3", "kimi_k2")
    staged = planned and not config["tie_word_embeddings"] and not prediction
    redundant, mapped = 0, None
    if family in ("qwen3_moe", "deepseek_v3", "kimi_k2") and not prediction and draw(st.booleans()):
        redundant = draw(st.sampled_from([0, 8]))
        places = draw(st.permutations(range(experts + redundant)))
        mapped = tuple(
            tuple((place + layer) % experts for place in places) for layer in range(config["num_hidden_layers"])
        )
    fuses = "n_shared_experts" in config and config["n_shared_experts"] == 1
    return EngineLayout(
        tensor,
        expert,
        data,
        context,
        copies,
        pipeline=draw(st.sampled_from([1, 2])) if staged else 1,
        head_over_attention=draw(st.booleans()),
        replicated_dense=draw(st.booleans()),
        replicated_shared=draw(st.booleans()),
        fused_shared_experts=fuses and draw(st.booleans()),
        redundant_experts=redundant,
        expert_map=mapped,
        up_first=draw(st.booleans()),
    )


@st.composite
def shapes(draw: st.DrawFn, family: str | None = None) -> SyncShape:
    """A model of the family (None: of any) on small layouts, with all kinds of nodes, some engines dead."""
    config = draw(models(family or draw(st.sampled_from(sorted(FAMILIES)))))
    form = PLAIN
    if draw(st.booleans()):
        form = Form(scales=BlockScales(BLOCK, powers_of_two=draw(st.booleans())))
    if config.get("num_nextn_predict_layers"):
        form = Form(draw(st.booleans()), form.scales)
    train, engine = draw(trainers(config, form.prediction)), draw(engines(config, form.prediction))
    ranks = engine.world_size
    gpus = draw(st.sampled_from([n for n in (1, 2, 4, 8) if ranks % n == 0 or n % ranks == 0]))
    replicas = draw(st.integers(1, 5))
    dead = draw(st.sets(st.integers(0, replicas - 1), max_size=replicas - 1))
    options = PlanOptions(
        operations_per_nic=draw(st.sampled_from([20, 60, 300])),
        least_parcel_bytes=draw(st.sampled_from([64, 1024])),
        granule_rows=BLOCK,
        class_copies_below=draw(st.sampled_from([0.0, 0.6])),
        windows=draw(st.sampled_from([1, 2, 3])),
        shortest_ring=draw(st.sampled_from([1, 2])),
    )
    topology = Topology(train.world_size, ranks, replicas, gpus, dead=frozenset(dead))
    return SyncShape(config, train, engine, topology, torch.bfloat16, form, options)
