"""Plans carried out byte by byte: what arrives is what the families' placements say, each byte written once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plan_execution import Trainer, check, packed, relay, run, store
from planner_models import BLOCK, DEEPSEEK, DENSE, FAMILIES, FINE, MOE, shapes

from slimerl.resharding.families import FAMILIES as TABLES
from slimerl.resharding.families.family import Form
from slimerl.resharding.families.scales import BlockScales
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make_plan, resume, without


def carried_out(plan, seed=0):
    trainer = Trainer(plan.shape, seed)
    check(plan, trainer.gathered(), run(plan, trainer))


EXAMPLES = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def test_every_family_with_a_table_is_carried_out_here():
    assert {config["model_type"] for config in FAMILIES.values()} == TABLES.keys()


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 99))
def test_p3_any_model_arrives_exactly_on_any_layout(family, data, seed):
    shape = data.draw(shapes(family))
    try:
        plan = make_plan(shape)
    except LayoutError as error:
        event(f"refused: {str(error).split(';')[0][-60:]}")
        return
    event("planned")
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


def held_after(plan, parcels, operations, before):
    """What NICs hold after some operations, and the same as pairs of arrays."""
    held = relay(plan, parcels, before, operations)
    nic, parcel = np.array(list(held), dtype=np.int64).reshape(-1, 2).T
    return held, parcel, nic


@EXAMPLES
@given(data=st.data())
def test_p5_a_sync_goes_on_exactly_without_the_engines_that_die_one_after_another(data):
    """Fault: engines die at any operation, also several on one node, also while the rest is under way."""
    experts = data.draw(st.sampled_from([1, 2]))
    engine = EngineLayout(data.draw(st.sampled_from([n for n in (1, 2, 4) if n % experts == 0])), experts)
    replicas, gpus = data.draw(st.integers(3, 6)), data.draw(st.sampled_from([1, 2, 4, 8]))
    topology = Topology(4, engine.tensor, replicas, gpus)
    # Zero: nodes of one class feed those of another, whatever the trainers could send.
    options = replace(FINE, class_copies_below=data.draw(st.sampled_from([0.0, 0.6])))
    plan = make_plan(SyncShape(MOE, MegatronLayout(2, 2, expert=2), engine, topology, options=options))
    trainer = Trainer(plan.shape, 0)
    parcels, held = packed(plan, trainer), {}
    for dead in data.draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1, unique=True)):
        done = data.draw(st.integers(0, len(plan.operations.sender)))
        held, parcel, nic = held_after(plan, parcels, done, held)
        plan = resume(plan, [dead], parcel, nic)
    check(plan, trainer.gathered(), store(plan, relay(plan, parcels, held)))


def test_a_sync_that_goes_on_sends_only_what_is_missing():
    plan = make_plan(SyncShape(DENSE, MegatronLayout(2), EngineLayout(2), Topology(2, 2, 4, 2), options=FINE))
    parcels = packed(plan, Trainer(plan.shape, 0))
    _, parcel, nic = held_after(plan, parcels, len(plan.operations.sender) // 2, {})
    rest, whole = resume(plan, [1], parcel, nic), without(plan, [1])
    alive = rest.nodes.number_of(rest.topology.nics)[nic] >= 0
    assert len(rest.operations.sender) == len(whole.operations.sender) - alive.sum()
    assert rest.digest != whole.digest
    everything = np.arange(len(plan.operations.sender))
    done = resume(plan, [1], plan.operations.parcel[everything], plan.operations.receiver[everything])
    assert len(done.operations.sender) == done.rounds == 0


def test_a_parcel_that_came_in_by_the_nic_of_a_dead_engine_is_sent_again_to_the_node_it_shared():
    """Fault: the node is taken to have the parcel, but the GPU that has it is gone."""
    plan = make_plan(SyncShape(DENSE, MegatronLayout(2), EngineLayout(1), Topology(2, 1, 4, 2), options=FINE))
    _, parcel, nic = held_after(plan, packed(plan, Trainer(plan.shape, 0)), len(plan.operations.sender), {})
    lost = set(parcel[nic == 2 + 0].tolist())
    rest = resume(plan, [0], parcel, nic)
    assert lost
    assert set(rest.operations.parcel.tolist()) == lost
    assert set(rest.operations.receiver.tolist()) == {2 + 1}


def senders(plan):
    """{(receiver, parcel): sender}"""
    sender, receiver, parcel = (column.tolist() for column in plan.operations[:3])
    return dict(zip(zip(receiver, parcel, strict=True), sender, strict=True))


def test_who_passes_a_parcel_on_is_the_nic_that_has_it():
    """Fault: another engine of the node is now the one by which parcels come in, and has not got this one."""
    topology = Topology(2, 1, 8, 4)
    plan = without(make_plan(SyncShape(DENSE, MegatronLayout(2), EngineLayout(1), topology, options=FINE)), [3])
    trainer = Trainer(plan.shape, 0)
    parcels = packed(plan, trainer)
    for done in range(0, len(plan.operations.sender), 7):
        held, parcel, nic = held_after(plan, parcels, done, {})
        rest, planned = resume(plan, [1], parcel, nic), without(plan, [1])
        check(rest, trainer.gathered(), store(rest, relay(rest, parcels, held)))
        if senders(rest).items() - senders(planned).items():
            return
    pytest.fail("in no case did another NIC than the planned one have the parcel")


def test_heads_of_one_rank_may_share_an_fp8_block():
    """Key heads of two rows, blocks of four: in Megatron's parameter they lie apart, with queries between them."""
    config = DENSE | {"head_dim": 2}
    topology = Topology(2, 1, 2, 1)
    form = Form(scales=BlockScales(BLOCK))
    plan = make_plan(SyncShape(config, MegatronLayout(1, 2), EngineLayout(1), topology, form=form, options=FINE))
    carried_out(plan)
    with pytest.raises(LayoutError, match=r"k_proj\.weight: part 0 of 2 of the trainer holds rows 0 to 2 of 4"):
        make_plan(SyncShape(config, MegatronLayout(2), EngineLayout(1), topology, form=form, options=FINE))


@pytest.mark.parametrize(
    ("train", "what"),
    [
        (MegatronLayout(4), r"mlp\.gate_proj\.weight: part 0 of 4 of the trainer holds rows 0 to 6 of 24"),
        (MegatronLayout(2, expert_tensor=2), r"q_proj\.weight: part 0 of 2 of the trainer holds rows 0 to 10 of 20"),
    ],
)
def test_a_trainer_that_cuts_an_fp8_block_is_refused_before_the_first_byte(train, what):
    """Fault: two ranks would each make a scale of their half of a block. The quantiser refuses the same part."""
    config = DENSE | {"intermediate_size": 24}
    if train.tensor == 2:
        config |= {"num_attention_heads": 2, "head_dim": 10}
    form = Form(scales=BlockScales(BLOCK))
    shape = SyncShape(config, train, EngineLayout(1), Topology(train.tensor, 1, 1), form=form)
    with pytest.raises(LayoutError, match=what + r", which cuts a block of 4: .* gathers whole tensors"):
        make_plan(shape)
    with pytest.raises(LayoutError, match="cuts a block of 4"):
        Trainer(shape, 0).ready(0)
