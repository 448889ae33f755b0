"""GLM-4.5, DeepSeek-V3 and Kimi-K2: the tables against an independent account, and there and back, bit for bit."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_models import assert_same, filled, random_state
from sparse_models import BLOCK, DEEPSEEK, GLM, MegatronReference, SglangReference, sparse_configs

from slimerl.resharding.assemble import collect
from slimerl.resharding.coverage import owned_placements
from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.layouts import EngineLayout, ExpertLocation, MegatronLayout

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
WITH_PREDICTION = Form(prediction=True)
SIZES = (1, 2, 4)


def assert_round_trip(config: dict[str, Any], layout: MegatronLayout) -> None:
    family, state = family_of(config), random_state(config, WITH_PREDICTION)
    ranks = [family.megatron_placements(config, layout, rank, WITH_PREDICTION) for rank in range(layout.world_size)]
    back = {name: tensor.clone().zero_() for name, tensor in state.items()}
    tensors = family.logical_tensors(config, form=WITH_PREDICTION)
    for placements, owned in zip(ranks, owned_placements(ranks, tensors), strict=True):
        if owned:
            collect(owned, filled(placements, state), back)
    assert_same(back, state)


@pytest.mark.parametrize("config", [DEEPSEEK, GLM], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("tensor", "pipeline", "expert"), list(itertools.product(SIZES, SIZES, SIZES)))
def test_w10_checkpoint_to_megatron_and_back_is_bit_exact_at_every_size(config, tensor, pipeline, expert):
    for expert_tensor in {1, tensor}:
        data = max(1, expert * expert_tensor // tensor)
        assert_round_trip(
            config,
            MegatronLayout(tensor=tensor, data=data, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor),
        )


@st.composite
def megatron_cases(draw: st.DrawFn) -> tuple[dict[str, Any], MegatronLayout]:
    tensor, data = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (2, 4)]))
    expert_tensor = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % size == 0]))
    expert = draw(st.sampled_from([size for size in (1, 2, 4) if tensor * data % (size * expert_tensor) == 0]))
    config = draw(sparse_configs(ranks=max(tensor, expert_tensor), expert=expert))
    return config, MegatronLayout(
        tensor=tensor,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        vocabulary_multiple=draw(st.sampled_from([1, 8])),
        split_latent=draw(st.booleans()),
    )


@EXAMPLES
@given(megatron_cases())
def test_megatron_shards_are_what_megatron_holds(case):
    config, layout = case
    state = random_state(config, WITH_PREDICTION)
    for rank in range(layout.world_size):
        placements = family_of(config).megatron_placements(config, layout, rank, WITH_PREDICTION)
        assert_same(filled(placements, state), MegatronReference(config, state, layout, rank).found)


@st.composite
def engine_layouts(draw: st.DrawFn) -> EngineLayout:
    tensor = draw(st.sampled_from(SIZES))
    sizes = [size for size in SIZES if tensor % size == 0]
    return EngineLayout(
        tensor=tensor,
        expert=draw(st.sampled_from(sizes)),
        data_attention=draw(st.sampled_from(sizes)),
        head_over_attention=draw(st.booleans()),
        replicated_dense=draw(st.booleans()),
        replicated_shared=draw(st.booleans()),
        up_first=draw(st.booleans()),
    )


def assert_engine_shards(config: dict[str, Any], layout: EngineLayout, form: Form) -> None:
    family, state = family_of(config), random_state(config, form)
    ranks = [family.engine_placements(config, layout, rank, form) for rank in range(layout.world_size)]
    back = {name: tensor.clone().zero_() for name, tensor in state.items()}
    owned = owned_placements(ranks, family.logical_tensors(config, form=form))
    for rank, placements in enumerate(ranks):
        parameters = filled(placements, state)
        assert_same(parameters, SglangReference(config, state, layout, rank).found)
        collect(owned[rank], parameters, back)
    assert_same(back, state)


@EXAMPLES
@given(st.data())
def test_engine_shards_are_what_sglang_holds(data):
    layout = data.draw(engine_layouts())
    form = Form(prediction=data.draw(st.booleans()))
    assert_engine_shards(data.draw(sparse_configs(ranks=layout.tensor, expert=layout.expert)), layout, form)


@EXAMPLES
@given(st.data())
def test_p3_fp8_data_and_scales_are_what_sglang_holds(data):
    layout = data.draw(engine_layouts())
    form = Form(prediction=data.draw(st.booleans()), scales=BlockScales(BLOCK))
    config = data.draw(sparse_configs(ranks=layout.tensor, expert=layout.expert, whole_blocks=True))
    assert_engine_shards(config, layout, form)


@pytest.mark.parametrize("scales", [None, BlockScales(BLOCK)], ids=["plain", "fp8"])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("config", [DEEPSEEK, GLM], ids=lambda config: config["model_type"])
def test_a_fused_shared_expert_lies_behind_the_routed_ones_of_every_rank(config, tensor, expert, scales):
    layout = EngineLayout(tensor=tensor, expert=expert, fused_shared_experts=True)
    assert_engine_shards(config, layout, Form(prediction=True, scales=scales))


def test_redundant_experts_hold_a_second_copy_of_the_first():
    layout = EngineLayout(tensor=4, expert=4, redundant_experts=4)
    assert_engine_shards(DEEPSEEK, layout, Form())
    slots = [layout.expert_slots(rank, 8, ExpertLocation.COPIED, 0) for rank in range(4)]
    assert slots == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
