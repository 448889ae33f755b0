"""Plans carried out byte by byte: what arrives is what the families' placements say, each byte written once."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_execution import check, random_model, run
from planner_models import DEEPSEEK, FINE, MOE, shapes

from slimerl.resharding.families.family import Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make_plan, without


def carried_out(plan, seed=0):
    model = random_model(plan, seed)
    check(plan, model, run(plan, model))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(shape=shapes(), seed=st.integers(0, 99))
def test_any_model_arrives_exactly_on_any_layout(shape, seed):
    try:
        plan = make_plan(shape)
    except LayoutError:
        return
    carried_out(plan, seed)


def test_the_bytes_on_the_wire_are_one_copy_for_each_node():
    shape = SyncShape(
        MOE, MegatronLayout(2, 2, expert=4, expert_tensor=1), EngineLayout(4, 4), Topology(4, 4, 3, 4), options=FINE
    )
    plan = make_plan(shape)
    received = plan.nic_bytes[1][4:].reshape(3, 4).sum(axis=1)
    assert (received == plan.template.model.wire_bytes).all()


def test_fp8_data_and_scales_arrive_in_the_engines_fused_parameters():
    engine = EngineLayout(4, 4, 4, replicated_dense=True, replicated_shared=True)
    train = MegatronLayout(2, 4, pipeline=2, expert=4, expert_tensor=1, stage_layers=((2, 1),))
    form = Form(prediction=True, scales=BlockScales(4))
    plan = make_plan(SyncShape(DEEPSEEK, train, engine, Topology(16, 4, 2, 2), form=form, options=FINE))
    assert any("weight_scale_inv" in template.name for template in plan.template.model.templates)
    carried_out(plan)


def test_experts_that_an_engine_holds_twice_are_written_twice():
    engine = EngineLayout(4, 4, redundant_experts=4)
    plan = make_plan(SyncShape(DEEPSEEK, MegatronLayout(2, 2, expert=2), engine, Topology(4, 4, 2, 4), options=FINE))
    carried_out(plan)


def test_an_expert_map_moves_experts_layer_by_layer():
    rng = np.random.default_rng(5)
    maps = tuple(tuple(int(e) for e in rng.permutation(np.arange(12) % 8)) for _ in range(3))
    engine = EngineLayout(4, 4, redundant_experts=4, expert_map=maps)
    plan = make_plan(SyncShape(DEEPSEEK, MegatronLayout(2, 2, expert=2), engine, Topology(4, 4, 2, 4), options=FINE))
    carried_out(plan)


def test_a_fused_shared_expert_lies_behind_the_routed_ones():
    engine = EngineLayout(2, 1, fused_shared_experts=True)
    plan = make_plan(SyncShape(DEEPSEEK, MegatronLayout(2, 2), engine, Topology(4, 2, 2, 2), options=FINE))
    carried_out(plan)


@pytest.mark.parametrize("dead", [[1], [0, 3]])
def test_a_plan_without_a_dead_engine_still_serves_the_others(dead):
    shape = SyncShape(MOE, MegatronLayout(2, 2, expert=2), EngineLayout(2, 2), Topology(4, 2, 5, 2), options=FINE)
    plan = make_plan(shape)
    spliced = without(plan, dead)
    assert spliced.shape.key != plan.shape.key
    assert (spliced.parcels.nbytes == plan.parcels.nbytes).all()
    carried_out(spliced)
