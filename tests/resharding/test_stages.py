"""Uneven pipelines agree with Megatron's own arithmetic in each of its three ways to say them."""

from types import SimpleNamespace
from typing import Any

import pytest

from slimerl.resharding.layouts import LayoutError, MegatronLayout
from slimerl.resharding.stages import Stages, counted_stages, read_stages, stages_with_ends

parallel_state = pytest.importorskip("megatron.core.parallel_state")
transformer_layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
transformer_block = pytest.importorskip("megatron.core.transformer.transformer_block")
layer_layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")


def options(layers: int, pipeline: int, virtual: int, **stated: Any) -> SimpleNamespace:
    defaults = {
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    return SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        **defaults | stated,
    )


def assert_as_megatron(stages: Stages, megatron: SimpleNamespace) -> None:
    pipeline, virtual = len(stages.layers[0]), len(stages.layers)
    layout = MegatronLayout(pipeline=pipeline, virtual=virtual, stage_layers=stages.layers)
    for stage in range(pipeline):
        held = layout.layers(stage, megatron.num_layers)
        for chunk in range(virtual):
            chunk_of = {"vp_stage": chunk if virtual > 1 else None, "pp_rank": stage}
            offset = transformer_layer.get_transformer_layer_offset(megatron, **chunk_of)
            count = transformer_block.get_num_layers_to_build(megatron, **chunk_of)
            prefix = f"model{chunk}." if virtual > 1 else ""
            mine = [(layer.local, layer.layer) for layer in held if layer.prefix == prefix]
            assert mine == [(local, offset + local) for local in range(count)]


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_an_embedding_or_loss_that_counts_as_a_layer_leaves_its_stage_one_less(embedding, loss, virtual):
    layers = 12 - embedding - loss
    megatron = options(
        layers,
        3,
        virtual,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )
    assert_as_megatron(counted_stages(layers, 3, virtual, embedding, loss), megatron)


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "first", "last"),
    [(10, 4, 1, 1, 3), (9, 3, 1, 1, None), (9, 3, 1, None, 5), (16, 4, 2, 2, 2), (61, 8, 1, 8, 5), (5, 2, 1, 2, 3)],
)
def test_stages_of_their_own_size_at_the_ends(layers, pipeline, virtual, first, last):
    megatron = options(
        layers, pipeline, virtual, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
    )
    assert_as_megatron(stages_with_ends(layers, pipeline, virtual, first, last), megatron)


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        ("Et*3|(tt|)*29,m|L", 32),
        ("Et*3|(tt|)*29,m|L", 16),
        ("Ettt|tt|t|tL", 2),
        ("E|(t|)*5mL", 7),
        ("Et|t*4|(tt|)*2L", 5),
    ],
)
def test_layouts_written_as_text_mean_what_they_mean_to_megatron(text, pipeline):
    stages = read_stages(text, pipeline)
    megatron = layer_layout.PipelineParallelLayerLayout(text, pipeline)
    kinds = layer_layout.LayerType
    assert stages.layers == tuple(
        tuple(megatron.layout[stage][chunk].count(kinds.decoder) for stage in range(pipeline))
        for chunk in range(megatron.virtual_pipeline_model_parallel_size)
    )
    found = [stage for stage in range(pipeline) if kinds.mtp in megatron.layout[stage][-1]]
    assert found == ([] if stages.prediction is None else [stages.prediction])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: counted_stages(8, 3, embedding=True, loss=True, virtual=2), "10 cannot be cut into 6"),
        (lambda: stages_with_ends(10, 4, first=1, last=2), "7 cannot be cut into 2"),
        (lambda: stages_with_ends(4, 2, first=1, last=2), "do not leave what others can hold"),
        (lambda: stages_with_ends(4, 3, first=3, last=2), "do not leave what others can hold"),
        (lambda: read_stages("Ett|xL", 2), "has x; known are"),
        (lambda: read_stages("Ett|t|L", 2), "3 cannot be cut into 2"),
        (lambda: read_stages("Et*1000000000000|L", 2), r"would be 1e\+12 characters long"),
        (lambda: read_stages("E(t*99999|)*1000L", 2), "characters long, spelled out"),
        (lambda: read_stages(f"Et*{'9' * 5000}|L", 2), "would be inf characters long"),
        (lambda: read_stages("tE|tL", 2), "the order must be"),
        (lambda: read_stages("Et|m|m|L", 4), "all m must be in one stage"),
        (lambda: read_stages("Et|m|L|", 2), "the order must be|all m must be"),
        (lambda: MegatronLayout(pipeline=2, prediction_stage=2), "prediction_stage 2 is none of 2"),
    ],
)
def test_a_pipeline_that_megatron_would_refuse_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
