"""Plans carried out by the members' own code, over links of memory: packed, relayed, fanned out, stored and proven."""

import pytest
import torch
from carried_plan import Sync, check_exact, random_tensors
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner_models import BLOCK, DEEPSEEK, DENSE, FINE, GLM, MOE, shapes

from slimerl.resharding.families import BlockScales, Form
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make_plan, without
from slimerl.resharding.proof import ProofError


def carried(plan, staged, seed=0, corrupt=None):
    sync = Sync(plan, random_tensors(plan, seed), staged, corrupt)
    sync.run()
    return sync


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(shape=shapes(), seed=st.integers(0, 99), staged=st.booleans())
def test_any_model_arrives_byte_for_byte_and_each_byte_once(shape, seed, staged):
    """Engines of up to eight ranks, up to five of them, on nodes that they share or that they span."""
    assume(shape.topology.nics <= 40)
    try:
        plan = make_plan(shape)
    except LayoutError:
        return
    check_exact(carried(plan, staged, seed))


def test_fp8_data_and_scales_are_made_by_the_ranks_that_send_them():
    form = Form(prediction=True, scales=BlockScales(BLOCK))
    engine = EngineLayout(4, 4, 4, replicated_dense=True, replicated_shared=True)
    train = MegatronLayout(2, 2, pipeline=2, expert=2, expert_tensor=1, stage_layers=((2, 1),))
    sync = carried(make_plan(SyncShape(DEEPSEEK, train, engine, Topology(8, 4, 2, 4), form=form, options=FINE)), True)
    check_exact(sync)
    cut = MegatronLayout(2, 2, expert_tensor=4)
    form = Form(scales=BlockScales(BLOCK))
    sync = carried(make_plan(SyncShape(GLM, cut, EngineLayout(), Topology(4, 1, 2, 1), form=form, options=FINE)), False)
    check_exact(sync)  # the trainer cuts scales into columns that no engine cuts
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in sync.tensors.values())


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_on_one_node_takes_each_parcel_once_and_fans_it_out(staged):
    shape = SyncShape(DENSE, MegatronLayout(2, 2), EngineLayout(4), Topology(4, 4, 3, 4), options=FINE)
    sync = carried(make_plan(shape), staged)
    check_exact(sync)
    entered = sum(n for (sender, _), n in sync.outcome.network.crossed.items() if sender < 4)
    assert entered == sync.plan.template.model.wire_bytes, "one copy leaves the trainers, engines pass it on"


def test_replicas_on_nodes_of_their_own_relay_to_each_other():
    shape = SyncShape(MOE, MegatronLayout(2, 2, expert=2), EngineLayout(2, 2), Topology(4, 2, 4, 1), options=FINE)
    sync = carried(make_plan(shape), staged=True)
    check_exact(sync)
    assert any(sender >= 4 for sender, _ in sync.outcome.network.crossed)


def test_without_a_dead_engine_the_others_are_served():
    shape = SyncShape(DEEPSEEK, MegatronLayout(2, 2, expert=2), EngineLayout(2), Topology(4, 2, 4, 2), options=FINE)
    sync = carried(without(make_plan(shape), [1]), staged=True)
    check_exact(sync)
    assert {replica for replica, _ in sync.outcome.engines} == {0, 2, 3}


def test_a_byte_that_flips_on_one_link_shows_at_that_hop_and_behind_it_alone():
    """Fault: one bit of one parcel, on its way from engine to engine."""
    shape = SyncShape(DENSE, MegatronLayout(2), EngineLayout(1), Topology(2, 1, 3, 1), options=FINE)
    plan = make_plan(shape)
    relays = [(int(s), int(r), int(p)) for s, r, p in zip(*sync_rows(plan), strict=True) if s >= 2]
    sender, receiver, parcel = relays[0]
    hits = []

    def flip(s, r, flat):
        if (s, r) != (sender, receiver) or hits:
            return flat
        hits.append(parcel)
        flat = flat.clone()
        flat[0] ^= 1
        return flat

    sync = carried(plan, staged=True, corrupt=flip)
    sums, taken = sync.outcome.sent_checksums, sync.outcome.taken_checksums
    wrong = {(member, p) for member, found in taken.items() for p, value in found.items() if sums[p] != value}
    assert (receiver, parcel) in wrong
    assert not any(member == sender for member, _ in wrong)
    assert {p for _, p in wrong} == {parcel}
    with pytest.raises(ProofError, match=f"engine-{receiver - 2} rank 0 does not hold what was sent"):
        sync.outcome.proof.check(f"engine-{receiver - 2}", sync.outcome.reports[receiver - 2])


def sync_rows(plan):
    from slimerl.resharding.shard_orders import transfers_of

    transfers = transfers_of(plan)
    return transfers.sender, transfers.receiver, transfers.parcel


def test_parcels_of_odd_sizes_and_mixed_dtypes_are_read_where_no_element_may_lie():
    from slimerl.engine.inside.parcels import Segment, checksum, pack, write

    flat = torch.zeros(3 * 2 + 2 * 4 + 1, dtype=torch.uint8)
    segments = [Segment(0, "bf16", -1, 0, 1, 0, 3), Segment(6, "fp32", -1, 0, 1, 0, 2)]
    given_ = {"bf16": torch.randn(3).bfloat16(), "fp32": torch.randn(2)}
    pack(flat, segments, given_, {name: value.dtype for name, value in given_.items()})
    found = {name: torch.zeros_like(value) for name, value in given_.items()}
    assert write(flat, segments, found) == 14
    assert all(torch.equal(found[name], given_[name]) for name in found)
    before = checksum(flat)
    flat[[0, 1]] = flat[[1, 0]]
    assert checksum(flat) != before
