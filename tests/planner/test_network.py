"""The network's simulator: hand-made cases with known times, then whole plans."""

import numpy as np
import pytest

from slimerl.resharding.layouts import EngineLayout, MegatronLayout
from slimerl.resharding.planner import SyncShape, Topology, make_plan
from slimerl.simulation.network import READY, Links, Transfers, bounce, simulate
from slimerl.simulation.network_sync import Conditions, simulate_death, simulate_sync

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def transfers(*rows):
    """(sender, receiver, bytes, after), in order."""
    columns = np.array(rows, dtype=np.int64).T
    return Transfers(*columns, np.arange(len(rows)))


def links(*speeds, **rest):
    return Links(np.array(speeds, dtype=float), **{"latency_s": 0.0, "overhead_s": 0.0, **rest})


def test_transfers_of_different_nics_run_at_once_and_those_of_one_after_another():
    apart = simulate(transfers((0, 1, 10, READY), (2, 3, 10, READY)), links(1, 1, 1, 1))
    assert apart.end_s.tolist() == [10, 10]
    shared = simulate(transfers((0, 1, 10, READY), (0, 2, 10, READY)), links(1, 1, 1))
    assert shared.end_s.tolist() == [10, 20]
    both_ways = simulate(transfers((0, 1, 10, READY), (1, 0, 10, READY)), links(1, 1))
    assert both_ways.seconds == 10


def test_the_slower_nic_sets_the_pace():
    assert simulate(transfers((0, 1, 10, READY)), links(1, 0.5)).seconds == 20


def test_what_has_arrived_is_passed_on_after_the_latency():
    chain = transfers((0, 1, 10, READY), (1, 2, 10, 0), (2, 3, 10, 1))
    assert simulate(chain, links(1, 1, 1, 1, latency_s=0.5, overhead_s=0.25)).end_s.tolist() == [10.25, 21, 31.75]


def test_the_plans_order_decides_between_what_is_ready():
    two = Transfers(*np.array([(0, 2, 4, READY), (1, 2, 6, READY)]).T, np.array([1, 0]))
    assert simulate(two, links(1, 1, 1)).end_s.tolist() == [10, 6]


def test_jitter_only_delays_and_is_the_same_for_the_same_seed():
    many = transfers(*((0, 1, 10, READY) for _ in range(50)))
    jittery = links(1, 1, jitter=0.1)
    first, again, other = (simulate(many, jittery, seed).seconds for seed in (1, 1, 2))
    assert first == again != other
    assert 500 < first < 550


def test_a_transfer_whose_data_never_comes_is_an_error():
    with pytest.raises(ValueError, match="waits for transfer 1"):
        simulate(transfers((0, 1, 1, 1), (1, 2, 1, 0)), links(1, 1, 1))


def test_a_slow_nics_mates_take_in_for_it_and_pass_on():
    chain = transfers(*((0, 1, 1, READY) for _ in range(10)), *((1, 3, 1, first) for first in range(10)))
    moved = bounce(chain, 1, np.array([2]), 0.3)
    assert (moved.receiver[:10] == 1).sum() == 3
    assert (moved.sender[10:] == moved.receiver[:10]).all()


@pytest.fixture(scope="module")
def plan():
    return make_plan(SyncShape(CONFIG, MegatronLayout(2, 8), EngineLayout(8), Topology(16, 8, 8)))


def test_a_sync_is_near_its_bound_and_never_below(plan):
    ideal = simulate_sync(plan, Conditions(latency_s=0, overhead_s=0))
    assert 1 <= ideal.ratio <= 1.05
    assert ideal.busy[1, 16:].mean() > 0.95


def test_a_slow_nic_costs_little_once_its_node_bounces_or_the_plan_knows(plan):
    victim = 16 + 3
    slow = ((victim, 0.5),)
    plain = simulate_sync(plan, Conditions(latency_s=0, overhead_s=0, slow=slow)).ratio
    bounced = simulate_sync(plan, Conditions(latency_s=0, overhead_s=0, slow=slow, bounce_share=0.1)).ratio
    aware = make_plan(SyncShape(CONFIG, MegatronLayout(2, 8), EngineLayout(8), Topology(16, 8, 8, slow=slow)))
    known = simulate_sync(aware, Conditions(latency_s=0, overhead_s=0)).seconds / plan.template.bounds.seconds
    assert plain > 1.9
    assert bounced < 1.4
    assert known < 1.2


def test_a_sync_that_loses_an_engine_goes_on_with_what_has_arrived(plan):
    bound = plan.template.bounds.seconds
    still = Conditions(latency_s=0, overhead_s=0)
    late = simulate_death(plan, 3, bound * 0.9, 0.0, 0.0, still)
    early = simulate_death(plan, 3, bound * 0.1, 0.0, 0.0, still)
    assert late.ratio < 1.3
    assert early.ratio < 1.3


def test_copies_inside_a_node_take_time(plan):
    slow_links = Topology(16, 1, 8, nvlink_bytes_per_s=1e9)
    one_gpu_engines = make_plan(SyncShape(CONFIG, MegatronLayout(2, 8), EngineLayout(1), slow_links))
    result = simulate_sync(one_gpu_engines)
    assert one_gpu_engines.template.bounds.binding == "nvlink"
    assert result.seconds > 2 * result.network_s
    assert result.ratio >= 1
