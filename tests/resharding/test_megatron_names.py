"""The tables name exactly the parameters that Megatron's own models have, in their shapes, on every rank."""

from typing import Any

import pytest
from megatron_models import shapes_on_every_rank
from sparse_models import DEEPSEEK, GLM, KIMI

from slimerl.resharding.coverage import check_parameters
from slimerl.resharding.families import Form, family_of
from slimerl.resharding.layouts import MegatronLayout, ModuleNames
from slimerl.resharding.stages import Stages, counted_stages, read_stages, stages_with_ends

pytest.importorskip("megatron.core")

DENSE: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": DENSE | {"model_type": "llama"},
    "llama, tied": DENSE | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": DENSE | {"model_type": "qwen2"},
    "qwen3": DENSE | {"model_type": "qwen3"},
    "qwen3_moe": DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16},
    "glm4_moe": GLM,
    "glm4_moe, no bias": GLM | {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 3},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, no query latent": DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2},
    "kimi_k2": KIMI,
}
LAYOUTS = [
    MegatronLayout(),
    MegatronLayout(tensor=2, data=2, expert=4, expert_tensor=1, vocabulary_multiple=8),
    MegatronLayout(tensor=2, data=2, pipeline=2, expert=2, expert_tensor=2, split_latent=True),
    MegatronLayout(tensor=4, expert=2, expert_tensor=2),
    MegatronLayout(tensor=2, pipeline=2, virtual=2, context=2, expert=4, expert_tensor=1),
    MegatronLayout(data=4, pipeline=4, expert=4),
]


def every_rank(config: dict[str, Any], layouts: list[MegatronLayout], changes: list[dict[str, Any]]) -> list[Any]:
    """Runs in the rank pool."""
    return [shapes_on_every_rank(config, layout, **more) for layout, more in zip(layouts, changes, strict=True)]


def assert_placed(config: dict[str, Any], layout: MegatronLayout, ranks: list[dict[str, tuple[int, ...]]]) -> None:
    form = Form(prediction=bool(config.get("num_nextn_predict_layers")))
    for rank, shapes in enumerate(ranks):
        check_parameters(family_of(config).megatron_placements(config, layout, rank, form), shapes)


@pytest.mark.parametrize("name", CONFIGS)
def test_w10_every_rank_holds_the_parameters_that_the_table_places(ranks, name):
    config = CONFIGS[name]
    layouts = [layout for layout in LAYOUTS if not (layout.expert > 1 and "moe_intermediate_size" not in config)]
    layouts = layouts if len(layouts) > 1 else [MegatronLayout(), MegatronLayout(tensor=2, pipeline=2, virtual=2)]
    [found] = ranks.run(1, every_rank, config, layouts, [{}] * len(layouts))
    for layout, shapes in zip(layouts, found, strict=True):
        assert_placed(config, layout, shapes)


EMBEDDING_AND_LOSS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
UNEVEN: list[tuple[Stages, int, dict[str, Any]]] = [
    *((read_stages(text, pipeline), pipeline, {"pipeline_model_parallel_layout": text}) for text, pipeline in [
        ("Ett|tt|m|L", 4),
        ("Et|t|t|t|m|L", 3),
        ("E|tttt|mL", 3),
        ("Et*2|(t|)*2,mL", 4),
    ]),
    (counted_stages(4, 2, embedding=True, loss=True), 2, EMBEDDING_AND_LOSS),
    (counted_stages(4, 3, embedding=True, loss=True), 3, EMBEDDING_AND_LOSS),
    (stages_with_ends(4, 3, first=2, last=1), 3,
     {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1}),
]  # fmt: skip


@pytest.mark.parametrize("config", [DEEPSEEK, GLM | {"num_nextn_predict_layers": 0}], ids=["prediction", "none"])
def test_w8_uneven_pipelines_keep_norm_head_and_prediction_where_megatron_does(ranks, config):
    """Fault: the final norm is looked for beside the head, where with a prediction layer it is behind the last layer;
    or the copy of the embedding beside that layer is taken as a tensor that nobody places."""
    layouts, changes = [], []
    for stages, pipeline, options in UNEVEN:
        if stages.prediction is not None and not config["num_nextn_predict_layers"]:
            continue
        layouts.append(
            MegatronLayout(
                pipeline=pipeline,
                virtual=len(stages.layers),
                stage_layers=stages.layers,
                prediction_stage=stages.prediction,
            )
        )
        changes.append(options)
    [found] = ranks.run(1, every_rank, config, layouts, changes)
    for layout, shapes in zip(layouts, found, strict=True):
        assert_placed(config, layout, shapes)


TE_DENSE = """
    decoder.layers.0.input_layernorm.weight
    decoder.layers.0.mlp.linear_fc1.layer_norm_weight
    decoder.layers.0.mlp.linear_fc1.weight
    decoder.layers.0.mlp.linear_fc2.weight
    decoder.layers.0.self_attention.linear_kv_down_proj.weight
    decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight
    decoder.layers.0.self_attention.linear_kv_up_proj.weight
    decoder.layers.0.self_attention.linear_proj.weight
    decoder.layers.0.self_attention.linear_q_down_proj.weight
    decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight
    decoder.layers.0.self_attention.linear_q_up_proj.weight
""".split()
TE_SPARSE = """
    decoder.layers.1.mlp.experts.linear_fc1.weight0
    decoder.layers.1.mlp.experts.linear_fc1.weight1
    decoder.layers.1.mlp.experts.linear_fc2.weight0
    decoder.layers.1.mlp.experts.linear_fc2.weight1
    decoder.layers.1.mlp.router.expert_bias
    decoder.layers.1.mlp.router.weight
    decoder.layers.1.mlp.shared_experts.linear_fc1.weight
    decoder.layers.1.mlp.shared_experts.linear_fc2.weight
    decoder.layers.1.pre_mlp_layernorm.weight
""".split()


def test_names_under_transformer_engine_are_those_that_mbridge_knows():
    """The names that mbridge maps for DeepSeek-V3 under Megatron's Transformer-Engine specification."""
    config = DEEPSEEK | {"n_routed_experts": 2}
    layout = MegatronLayout(names=ModuleNames.TRANSFORMER_ENGINE)
    placements = family_of(config).megatron_placements(config, layout, 0, Form(prediction=True))
    names = {placement.parameter for placement in placements}
    assert sorted(name for name in names if ".layers.0." in name and "mtp" not in name) == TE_DENSE
    attention = [name.replace(".0.", ".1.") for name in TE_DENSE if ".mlp." not in name]
    sparse = sorted(attention + TE_SPARSE)
    assert sorted(name for name in names if ".layers.1." in name) == sparse
    moved = [name.replace("decoder.layers.1.", "mtp.layers.0.transformer_layer.") for name in sparse]
    own = [f"mtp.layers.0.{name}.weight" for name in ("eh_proj", "enorm", "final_layernorm", "hnorm")]
    assert sorted(name for name in names if "mtp" in name) == sorted(moved + own)
