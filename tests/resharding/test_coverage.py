"""Nothing is left out, nothing is written twice, and what is wrong is named."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimerl.resharding.assemble import collect, scatter
from slimerl.resharding.boxes import Box
from slimerl.resharding.coverage import CoverageError, check_parameters, check_tiling, find_overlap, owned_placements
from slimerl.resharding.families import ConfigError, family_of
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.tensors import Placement

CONFIG = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILY = family_of(CONFIG)
TENSORS = FAMILY.logical_tensors(CONFIG)


def placements(tensor: int = 1, rank: int = 0) -> list[Placement]:
    return FAMILY.megatron_placements(CONFIG, MegatronLayout(tensor=tensor), rank)


def model(placed: list[Placement]) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for place in placed:
        shapes[place.parameter] = tuple(map(max, shapes.get(place.parameter, place.at.stops), place.at.stops))
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def checkpoint() -> dict[str, torch.Tensor]:
    return {tensor.name: torch.rand(tensor.shape) for tensor in TENSORS}


def without(placed: list[Placement], tensor: str) -> list[Placement]:
    return [place for place in placed if place.tensor != tensor]


def test_w3_a_parameter_that_the_table_does_not_place_is_named():
    """Fault: the model has a parameter that no rule fills; it would keep its initial value."""
    parameters = model(placements()) | {"decoder.layers.0.surprise.weight": torch.zeros(3)}
    with pytest.raises(CoverageError, match=r"does not place: decoder\.layers\.0\.surprise\.weight"):
        scatter(placements(), checkpoint(), parameters)


def test_w3_a_placed_parameter_that_the_model_lacks_is_named():
    parameters = model(placements())
    del parameters["decoder.final_layernorm.weight"]
    with pytest.raises(CoverageError, match=r"does not have: decoder\.final_layernorm\.weight"):
        scatter(placements(), checkpoint(), parameters)


def test_w3_a_half_filled_fused_parameter_is_named():
    """Fault: the up projection is forgotten; half of fc1 would keep its old values."""
    up = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CoverageError, match=r"decoder\.layers\.1\.mlp\.linear_fc1\.weight: .* 384 of its 768"):
        scatter(without(placements(), up), checkpoint(), model(placements()))


def test_w3_a_missing_logical_tensor_is_named():
    logical = checkpoint()
    del logical["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        scatter(placements(), logical, model(placements()))


def test_w3_a_tensor_that_no_rank_holds_is_named():
    ranks = [without(placements(2, rank), "model.norm.weight") for rank in range(2)]
    with pytest.raises(CoverageError, match=r"model\.norm\.weight: placements cover 0 of its 16"):
        owned_placements(ranks, TENSORS)


def test_w3_a_part_that_no_rank_holds_is_named():
    ranks = [placements(2, 0), without(placements(2, 1), "model.layers.0.mlp.down_proj.weight")]
    with pytest.raises(CoverageError, match=r"layers\.0\.mlp\.down_proj\.weight: placements cover 192 of its 384"):
        owned_placements(ranks, TENSORS)


def test_w3_ranks_that_disagree_about_a_cut_are_an_error():
    ranks = [placements(2, 0), placements(1, 0)]
    with pytest.raises(CoverageError, match="elements in common"):
        owned_placements(ranks, TENSORS)


def test_w3_a_tensor_that_is_none_of_the_model_is_named():
    stranger = replace(placements()[0], tensor="model.stranger.weight")
    with pytest.raises(CoverageError, match=r"model\.stranger\.weight"):
        owned_placements([[*placements(), stranger]], TENSORS)


def test_a_doubly_written_parameter_is_named():
    twice = [*placements(), placements()[-1]]
    with pytest.raises(CoverageError, match=r"output_layer\.weight: .* in common"):
        scatter(twice, checkpoint(), model(placements()))


def test_a_tensor_of_another_shape_is_named_in_both_directions():
    logical = checkpoint() | {"model.norm.weight": torch.rand(15)}
    with pytest.raises(CoverageError, match=r"model\.norm\.weight has shape \(15,\)"):
        scatter(placements(), logical, model(placements()))
    with pytest.raises(CoverageError, match=r"model\.norm\.weight"):
        collect(placements(), model(placements()), logical)


def test_padding_is_set_to_zero():
    """Fault: padding rows keep what was there; the digest over them would differ from the engine's zeros."""
    layout = MegatronLayout(tensor=2, vocabulary_multiple=16)
    placed = FAMILY.megatron_placements(CONFIG, layout, 1)
    parameters = {name: tensor.fill_(7) for name, tensor in model(placed).items()}
    logical = checkpoint()
    scatter(placed, logical, parameters)
    table = parameters["embedding.word_embeddings.weight"]
    assert torch.equal(table[:4], logical["model.embed_tokens.weight"][16:])
    assert table.shape == (16, 16)
    assert not table[4:].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FAMILY.megatron_placements(CONFIG, MegatronLayout(tensor=3), 0), "4 attention heads.* into 3"),
        (lambda: FAMILY.engine_placements(CONFIG, EngineLayout(tensor=3), 0), "4 attention heads.* into 3"),
        (lambda: FAMILY.megatron_placements(CONFIG, MegatronLayout(), 1), "rank 1 is outside"),
        (lambda: FAMILY.megatron_placements(CONFIG, MegatronLayout(pipeline=3), 0), "layers over pipeline"),
        (lambda: MegatronLayout(tensor=2, expert=4), "expert_tensor"),
        (lambda: MegatronLayout(pipeline=2, stage_layers=((1,),)), "2 stages"),
        (lambda: FAMILY.megatron_placements(CONFIG, MegatronLayout(pipeline=2, stage_layers=((1, 2),)), 0), "3 layers"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"'lama' has no table; known: deepseek_v3, .*llama, .*qwen3"),
        ({"model_type": None}, "None has no table"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, not '2'"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"dtype": "float33"}, "float33"),
    ],
)
def test_a_config_that_no_table_fits_is_refused_by_its_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        family_of({**CONFIG, **changes}).logical_tensors({**CONFIG, **changes})


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    bounds = [st.lists(st.integers(0, size), min_size=2, max_size=2).map(sorted) for size in shape]
    return st.tuples(*bounds).map(lambda b: Box(tuple(low for low, _ in b), tuple(high for _, high in b)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(boxes_in((6, 5)), max_size=6))
def test_tiling_is_found_exactly_where_every_element_is_counted_once(boxes):
    counts = torch.zeros(6, 5)
    for box in boxes:
        counts[box.slices] += 1
    assert (find_overlap(boxes) is not None) == bool((counts > 1).any())
    if (counts == 1).all():
        check_tiling("w", (6, 5), boxes)
    else:
        with pytest.raises(CoverageError, match="w: "):
            check_tiling("w", (6, 5), boxes)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(boxes_in((6, 5)), boxes_in((6, 5)))
def test_an_intersection_holds_the_common_elements_and_counts_from_a_corner(one, other):
    members = [set(itertools.product(*(range(s.start, s.stop) for s in box.slices))) for box in (one, other)]
    common = one.intersect(other)
    if common is None:
        assert not members[0] & members[1]
        return
    inner = torch.arange(30).view(6, 5)[one.slices][common.relative_to(one).slices]
    assert inner.flatten().tolist() == sorted(5 * row + column for row, column in members[0] & members[1])


def test_a_box_outside_of_its_parameter_is_named():
    placed = [Placement("p", Box((0,), (4,)), "t", Box((0,), (4,)))]
    with pytest.raises(CoverageError, match=r"p: .* does not lie in its shape \(3,\)"):
        check_parameters(placed, {"p": (3,)})


def test_an_experts_matrix_lies_in_a_slice_of_a_stack():
    stacked = Placement("w13", Box((1, 0, 0), (2, 2, 3)), "gate", Box((0, 0), (2, 3)))
    parameter = torch.zeros(2, 2, 3)
    stacked.view_of(parameter).copy_(torch.ones(2, 3))
    assert parameter.sum(dim=(1, 2)).tolist() == [0, 6]
    with pytest.raises(ValueError, match="cannot hold"):
        Placement("w13", Box((0, 0, 0), (2, 2, 3)), "gate", Box((0, 0), (4, 3)))
