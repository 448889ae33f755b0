"""Layouts as values agree with Megatron's own arithmetic and SGLang's documented one."""

from types import SimpleNamespace

import pytest

from slimerl.resharding.layouts import Axis, EngineLayout, ExpertLocation, LayoutError, MegatronLayout

parallel_state = pytest.importorskip("megatron.core.parallel_state")
transformer_layer = pytest.importorskip("megatron.core.transformer.transformer_layer")

LAYOUTS = [
    MegatronLayout(tensor=2, data=2),
    MegatronLayout(tensor=2, data=2, context=2, pipeline=2),
    MegatronLayout(tensor=2, data=4, pipeline=2, expert=4),
    MegatronLayout(tensor=4, data=2, expert=4, expert_tensor=1),
    MegatronLayout(tensor=2, context=2, data=2, pipeline=3, expert=2, expert_tensor=2),
]


def megatron_groups(layout: MegatronLayout, token: str, expert: bool) -> list[list[int]]:
    """Groups of ranks that differ in `token` alone, by Megatron's own generator in its default order."""
    model = layout.tensor * layout.context * layout.data
    if expert:
        size = layout.expert_tensor_size
        sizes = {"tp": size, "ep": layout.expert, "dp": model // (size * layout.expert), "cp": 1}
    else:
        sizes = {"tp": layout.tensor, "ep": 1, "dp": layout.data, "cp": layout.context}
    generator = parallel_state.RankGenerator(**sizes, pp=layout.pipeline, order="tp-cp-ep-dp-pp")
    return generator.get_ranks(token)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("token", "field", "expert"),
    [
        ("tp", "tensor", False),
        ("cp", "context", False),
        ("dp", "data", False),
        ("pp", "pipeline", False),
        ("tp", "expert_tensor", True),
        ("ep", "expert", True),
        ("dp", "expert_data", True),
    ],
)
def test_ranks_stand_where_megatron_puts_them(layout, token, field, expert):
    for group in megatron_groups(layout, token, expert):
        assert [getattr(layout.coordinates(rank), field) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(8, 4, 1), (12, 2, 3)])
def test_layers_lie_where_megatron_puts_them(layers, pipeline, virtual):
    """Uneven pipelines: test_stages.py."""
    layout = MegatronLayout(pipeline=pipeline, virtual=virtual)
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for stage in range(pipeline):
        held = layout.layers(stage, layers)
        for chunk in range(virtual):
            chunk_of = chunk if virtual > 1 else None
            offset = transformer_layer.get_transformer_layer_offset(config, vp_stage=chunk_of, pp_rank=stage)
            prefix = f"model{chunk}." if virtual > 1 else ""
            mine = [(layer.local, layer.layer) for layer in held if layer.prefix == prefix]
            assert mine == [(local, offset + local) for local in range(layers // pipeline // virtual)]


def test_the_first_chunk_of_the_first_stage_embeds_and_the_last_of_the_last_has_the_head():
    layout = MegatronLayout(pipeline=2, virtual=2)
    assert [layout.first_prefix(rank) for rank in range(2)] == ["model0.", None]
    assert [layout.last_prefix(rank) for rank in range(2)] == [None, "model1."]


def test_engine_ranks_share_attention_and_experts_as_sglang_does():
    layout = EngineLayout(tensor=8, expert=4, data_attention=2)
    assert [layout.part(rank, Axis.ATTENTION).number for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.part(rank, Axis.EXPERT) for rank in (0, 1, 2)] == [(0, 2), (1, 2), (0, 2)]
    firsts = [layout.expert_slots(rank, 8, ExpertLocation.FIXED, 0)[0] for rank in range(8)]
    assert firsts == [0, 0, 2, 2, 4, 4, 6, 6]
    assert layout.part(5, Axis.DENSE) == layout.part(5, Axis.HEAD) == (5, 8)
    assert layout.part(5, Axis.NONE) == (0, 1)


def test_an_engines_stages_hold_layers_in_order_and_the_last_ones_those_that_are_left_over():
    layout = EngineLayout(tensor=2, pipeline=3)
    held = [[each.layer for each in layout.layers(rank, 8)] for rank in range(6)]
    assert held == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [5, 6, 7], [5, 6, 7]]
    assert [layout.first_prefix(rank) for rank in range(6)] == ["", "", None, None, None, None]
    assert [layout.last_prefix(rank) for rank in range(6)] == [None, None, None, None, "", ""]
    assert [layout.part(rank, Axis.DENSE) for rank in (0, 3, 4)] == [(0, 2), (1, 2), (0, 2)]


def test_groups_that_share_a_sequence_hold_the_same_attention_and_groups_of_their_own_all_experts():
    layout = EngineLayout(tensor=8, expert=2, data_attention=2, context_attention=2, data_expert=2)
    assert [layout.part(rank, Axis.ATTENTION) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [layout.part(rank, Axis.EXPERT) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    firsts = [layout.expert_slots(rank, 8, ExpertLocation.FIXED, 0)[0] for rank in range(8)]
    assert firsts == [0, 0, 4, 4, 0, 0, 4, 4]


def test_an_engine_without_dp_attention_cuts_the_embedding_over_all_its_gpus():
    assert EngineLayout(tensor=4, context_attention=2).part(3, Axis.EMBEDDING) == (3, 4)
    assert EngineLayout(tensor=8, data_attention=2, context_attention=2).part(3, Axis.EMBEDDING) == (1, 2)


@pytest.mark.parametrize("sizes", [{"expert": 2, "data_expert": 4}, {"data_attention": 2, "context_attention": 4}])
def test_groups_that_an_engines_gpus_do_not_divide_into_are_refused(sizes):
    with pytest.raises(LayoutError, match="engine tensor over"):
        EngineLayout(tensor=4, **sizes)


@pytest.mark.parametrize(
    ("changes", "axis", "parts"),
    [
        ({}, Axis.HEAD, 8),
        ({"head_over_attention": True}, Axis.HEAD, 4),
        ({}, Axis.EMBEDDING, 4),
        ({}, Axis.DENSE, 8),
        ({"replicated_dense": True}, Axis.DENSE, 1),
        ({"replicated_dense": True}, Axis.SHARED, 8),
        ({"replicated_shared": True}, Axis.SHARED, 1),
        ({"replicated_shared": True}, Axis.DENSE, 8),
        ({}, Axis.LATENT, 1),
    ],
)
def test_each_option_of_the_engine_changes_what_it_says(changes, axis, parts):
    layout = EngineLayout(tensor=8, data_attention=2, **changes)
    assert [layout.part(rank, axis) for rank in range(8)] == [(rank % parts, parts) for rank in range(8)]


@pytest.mark.parametrize(("vocabulary", "attention", "padded"), [(512, 1, 512), (500, 3, 576), (130, 4, 192)])
def test_the_padding_of_the_vocabulary_follows_the_ranks_that_share_it(vocabulary, attention, padded):
    layout = EngineLayout(tensor=12, data_attention=12 // attention)
    part = layout.part(0, Axis.EMBEDDING)
    assert layout.padded_vocabulary(vocabulary, part.of) == padded


def test_an_expert_map_says_which_expert_lies_where_on_each_layer():
    layout = EngineLayout(tensor=2, expert=2, redundant_experts=2, expert_map=((0, 1, 2, 3, 3, 2), (3, 2, 1, 0, 0, 1)))
    slots = [layout.expert_slots(rank, 4, ExpertLocation.COPIED, layer) for layer in (0, 1) for rank in (0, 1)]
    assert slots == [(0, 1, 2), (3, 3, 2), (3, 2, 1), (0, 0, 1)]


def test_without_a_map_redundant_places_begin_again_with_the_first_expert():
    layout = EngineLayout(tensor=3, expert=3, redundant_experts=2)
    slots = [list(layout.expert_slots(rank, 4, ExpertLocation.COPIED, 0)) for rank in range(3)]
    assert slots == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("layout", "location", "message"),
    [
        (EngineLayout(2, expert=2, redundant_experts=2), ExpertLocation.FIXED, "loads none for this model"),
        (EngineLayout(2, expert=2, redundant_experts=2), ExpertLocation.MAPPED, "loads none for this model"),
        (EngineLayout(2, expert=2, redundant_experts=1), ExpertLocation.COPIED, "5 cannot be cut into 2"),
        (EngineLayout(2, expert=2, expert_map=((0, 1),)), ExpertLocation.COPIED, "not 4 places for layer 0"),
        (EngineLayout(2, expert=2, expert_map=()), ExpertLocation.MAPPED, "not 4 places for layer 0"),
    ],
)
def test_experts_that_cannot_be_placed_are_refused(layout, location, message):
    with pytest.raises(LayoutError, match=message):
        layout.expert_slots(0, 4, location, 0)


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "padded"), [(512, 1, 512), (500, 1, 512), (49152, 3, 49152), (500, 3, 576), (64, 4, 64)]
)
def test_the_engine_pads_the_vocabulary_as_sglang_does(vocabulary, tensor, padded):
    assert EngineLayout(tensor=tensor).padded_vocabulary(vocabulary) == padded


def test_the_trainer_pads_the_vocabulary_to_its_multiple():
    assert MegatronLayout(tensor=4).padded_vocabulary(10) == 12
    assert MegatronLayout(tensor=2, vocabulary_multiple=128).padded_vocabulary(300) == 512


@pytest.mark.parametrize("kind", [MegatronLayout, EngineLayout])
@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused_by_its_name(kind, size):
    """Fault: -2 divides the grid, and 0 divides by zero."""
    with pytest.raises(LayoutError, match=f"tensor = {size}, pipeline = {size} must be at least 1"):
        kind(tensor=size, pipeline=size)


def test_a_rank_outside_of_a_layout_is_refused():
    for layout in (MegatronLayout(tensor=2), EngineLayout(tensor=2)):
        with pytest.raises(LayoutError, match="rank 2 is outside"):
            layout.layers(2, 4)
