"""How near plans are to the limit: levels against a linear program, rounds, operations, keys."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_matrix import MATRIX, shape_of
from planner_models import DENSE, FINE, MODELS, MOE
from scipy.optimize import linprog
from sync_bound import linear_bound

from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.planner import PlanCache, PlanOptions, SyncShape, Topology, make_plan
from slimerl.resharding.planner.lines import cut_line
from slimerl.resharding.planner.waterfill import level

WIDE = DENSE | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}
WIDE_MOE = MOE | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}


def linear_level(owners, nbytes, speeds):
    """The least time of the slowest rank, by linear programming."""
    sets, ranks = np.nonzero(owners)
    count, all_ranks = len(sets), owners.shape[1]
    limit = np.zeros((all_ranks, count + 1))
    limit[ranks, np.arange(count)] = 1 / speeds[ranks]
    limit[:, -1] = -1
    equal = np.zeros((len(owners), count + 1))
    equal[sets, np.arange(count)] = 1
    return linprog(np.r_[np.zeros(count), 1], limit, np.zeros(all_ranks), equal, nbytes).fun


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), density=st.sampled_from([0.05, 0.2, 0.5]))
def test_the_water_level_is_the_linear_programs(seed, density):
    rng = np.random.default_rng(seed)
    sets, ranks = int(rng.integers(1, 30)), int(rng.integers(1, 40))
    owners = rng.random((sets, ranks)) < density
    owners[np.arange(sets), rng.integers(0, ranks, sets)] = True
    nbytes, speeds = rng.exponential(size=sets) ** 3 * 10, rng.choice([0.5, 1.0], ranks)
    found = level(owners, nbytes, speeds)
    best = linear_level(owners, nbytes, speeds)
    assert found.seconds.max() <= best * 1.002
    assert best * 0.998 <= found.bound_s <= best * (1 + 1e-6)
    assert found.shares.sum(axis=1) == pytest.approx(nbytes)
    assert not found.shares[~owners].any()


@pytest.mark.parametrize(
    ("config", "train", "engine", "replicas"),
    [
        (WIDE, MegatronLayout(2, 4), EngineLayout(8), 4),
        (WIDE, MegatronLayout(2, pipeline=2, stage_layers=((6, 2),)), EngineLayout(8), 1),
        (WIDE, MegatronLayout(1, 2), EngineLayout(16), 2),
        (WIDE_MOE, MegatronLayout(2, 4, expert=8, expert_tensor=1), EngineLayout(8, 8, 8), 3),
        (WIDE_MOE, MegatronLayout(1, 4, expert=2, expert_tensor=2), EngineLayout(2, 2), 8),
        (WIDE_MOE, MegatronLayout(1, 2, expert=2), EngineLayout(16, 8), 1),
        # nodes that are not full
        (WIDE, MegatronLayout(1, 4), EngineLayout(2), 3),
        (WIDE, MegatronLayout(1, 4), EngineLayout(1), 9),
        (WIDE_MOE, MegatronLayout(1, 8, expert=4), EngineLayout(4, 2), 3),
    ],
)
def test_the_fullest_nic_is_within_one_percent_of_a_linear_program(config, train, engine, replicas):
    topology = Topology(train.world_size, engine.world_size, replicas)
    # A few megabytes for each NIC: they are level to a percent only where tensors are cut finely.
    shape = SyncShape(config, train, engine, topology, options=PlanOptions(granule_rows=8))
    plan, bound = make_plan(shape), linear_bound(shape)
    sent, received = plan.nic_bytes
    assert max(sent.max(), received.max()) / shape.topology.nic_bytes_per_s <= 1.01 * bound
    assert max(plan.template.bounds.egress_s, plan.template.bounds.ingress_s) == pytest.approx(bound, rel=1e-4)


def test_the_plan_avoids_a_slow_nic_where_its_node_has_others():
    topology = Topology(4, 8, 4, slow=((4 + 3, 0.5),))
    plan = make_plan(SyncShape(WIDE, MegatronLayout(2, 2), EngineLayout(8), topology))
    received = plan.nic_bytes[1][4:].reshape(4, 8)
    assert received[0, 3] / received[0].mean() == pytest.approx(8 / 15, rel=0.05)
    assert received[0].sum() == received[1].sum()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_no_round_does_a_nic_send_or_receive_twice(name):
    train, engine = MegatronLayout(2, 4, expert=2), EngineLayout(4, 2, 4)
    plan = make_plan(SyncShape(MODELS[name], train, engine, Topology(8, 4, 6, 4), options=FINE))
    assert not plan.template.relay_classes
    for nic in (plan.operations.sender, plan.operations.receiver):
        pairs = np.stack([nic, plan.operations.round])
        assert len(np.unique(pairs, axis=1).T) == len(nic)
    # As few rounds as the busiest NIC has operations, but for filling the rings.
    assert plan.rounds <= plan.nic_operations[1].max() * 1.5 + 2 * len(plan.nodes.rings[0])


def test_engines_have_no_more_operations_than_allowed_and_small_tensors_travel_packed():
    for allowed in (100, 300):
        shape = SyncShape(WIDE, MegatronLayout(2, 2), EngineLayout(8), Topology(4, 8, 4))
        plan = make_plan(replace(shape, options=PlanOptions(operations_per_nic=allowed, least_parcel_bytes=1 << 12)))
        sent, received = plan.nic_operations
        assert (sent + received)[4:].max() <= allowed
        assert len(plan.fragments) > len(plan.parcels) or allowed == 300


def test_a_window_has_whole_layers():
    options = replace(FINE, windows=2)
    plan = make_plan(SyncShape(MOE, MegatronLayout(2), EngineLayout(2), Topology(2, 2, 2, 2), options=options))
    window = plan.parcels.window[plan.parcel_of_fragment]
    unit = plan.template.atoms.unit[plan.fragments.atom]
    assert set(window) == {0, 1}
    assert all(len(set(window[unit == each])) == 1 for each in set(unit.tolist()))


def test_every_owner_has_something_to_send_in_every_window():
    options = PlanOptions(windows=2, least_parcel_bytes=1 << 12)
    plan = make_plan(SyncShape(WIDE, MegatronLayout(1, 4), EngineLayout(8), Topology(4, 8, 2), options=options))
    sent = np.zeros((4, 2))
    np.add.at(sent, (plan.parcels.root, plan.parcels.window), plan.parcels.nbytes)
    assert sent.min() > 0.2 * sent.sum() / sent.size


def test_equal_shapes_give_equal_plans_and_the_cache_makes_each_once():
    shape = SyncShape(DENSE, MegatronLayout(2, 2), EngineLayout(2), Topology(4, 2, 3, 2), options=FINE)
    cache = PlanCache(size=2)
    first = cache.plan(shape)
    assert (
        cache.plan(SyncShape(dict(DENSE), MegatronLayout(2, 2), EngineLayout(2), shape.topology, options=FINE)) is first
    )
    assert make_plan(shape).digest == first.digest
    slower = replace(shape, topology=replace(shape.topology, slow=((5, 0.5),)))
    assert slower.key != shape.key
    assert cache.plan(slower).digest != first.digest
    cache.plan(replace(shape, topology=replace(shape.topology, replicas=2)))
    assert cache.plan(shape) is not first, "the oldest of three is forgotten"


def test_a_dead_engine_changes_the_routes_but_not_the_parcels_of_the_key():
    shape = SyncShape(DENSE, MegatronLayout(2), EngineLayout(2), Topology(2, 2, 3, 2))
    assert replace(shape, topology=replace(shape.topology, dead=frozenset({1}))).key != shape.key


def test_engines_that_do_not_fit_on_nodes_are_refused():
    with pytest.raises(LayoutError, match="one must divide the other"):
        Topology(8, 6, 2, gpus_per_node=8)
    with pytest.raises(LayoutError, match="none of 2 replicas"):
        Topology(8, 8, 2, dead=frozenset({0, 1}))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"replicas": 0}, "replicas = 0 must be at least 1"),
        ({"gpus_per_node": 0}, "gpus_per_node = 0 must be at least 1"),
        ({"trainer_ranks": -2, "engine_ranks": 0}, "trainer_ranks = -2, engine_ranks = 0 must be at least 1"),
        *(
            ({"nic_bytes_per_s": speed}, "nic_bytes_per_s = .* must be a finite")
            for speed in (0.0, -5e9, math.nan, math.inf)
        ),
    ],
)
def test_a_machine_of_no_size_or_speed_is_refused_by_its_name(sizes, message):
    with pytest.raises(LayoutError, match=message):
        Topology(**{"trainer_ranks": 8, "engine_ranks": 8, "replicas": 2} | sizes)


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=20
    ),
    at=st.lists(st.floats(0, 1), max_size=10),
    least=st.integers(0, 30),
)
def test_a_line_is_cut_into_consecutive_rows_at_whole_granules(items, at, least):
    rows, row_bytes, granule = (np.array(column) for column in zip(*items, strict=True))
    cuts = np.sort(np.array(at)) * float((rows * row_bytes).sum())
    pieces = cut_line(rows, row_bytes, granule, cuts, least)
    for item in range(len(rows)):
        mine = pieces.item == item
        assert pieces.first[mine].tolist() == [0, *pieces.stop[mine][:-1].tolist()]
        assert pieces.stop[mine][-1] == rows[item]
        assert all(stop % granule[item] == 0 or stop == rows[item] for stop in pieces.stop[mine])
        inner = (pieces.stop - pieces.first)[mine] * row_bytes[item]
        assert mine.sum() == 1 or inner.min() >= min(least, granule[item] * row_bytes[item])
    assert (np.diff(pieces.bin) >= 0).all()
    assert pieces.bin.max() <= len(cuts)


def test_nodes_that_feed_other_nodes_send_no_more_than_they_receive():
    plan = make_plan(shape_of(next(case for case in MATRIX if case.name == "kimi-k2 64 trainers")))
    sent, received = plan.nic_bytes
    assert plan.template.relay_classes
    assert (plan.turns.feeder >= 0).any()
    assert sent[64:].max() <= received.max() * 1.001
