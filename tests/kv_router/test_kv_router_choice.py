"""Where the KV-aware router sends what."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fixtures import MODEL, engine, prompt, send, serving

from slimerl.rollout.kv_fleet import EngineModel, Fleet
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.router import Query, RouterError
from slimerl.samples.messages import EngineState


def test_a_session_stays_where_its_kv_is() -> None:
    router = serving(4)
    history = prompt(1, 1000)
    first = send(router, "s", tokens=history)
    router.end(first, generated=100)
    for turn in range(2, 6):
        slot = send(router, "s", tokens=prompt(1, 1000 * turn))
        assert slot.engine_id == first.engine_id
        router.end(slot, generated=100)


def test_a_session_leaves_an_engine_that_is_crowded_with_others() -> None:
    router = serving(2)
    home = send(router, "s", tokens=prompt(1, 500)).engine_id
    for number in range(15):
        router.reserve(home, Query(f"x{number}", expected_new_tokens=4000))
    assert router.route(Query("s", tokens=prompt(1, 600), expected_new_tokens=4000)) != home


def test_a_crowded_session_stays_where_moving_costs_more_prefill_than_it_saves() -> None:
    router = serving(2)
    home = send(router, "s", tokens=prompt(1, 40_000)).engine_id
    for number in range(8):
        router.reserve(home, Query(f"x{number}", expected_new_tokens=200))
    assert router.route(Query("s", tokens=prompt(1, 40_200), expected_new_tokens=200)) == home


def test_a_session_does_not_change_one_queue_for_another() -> None:
    router = serving(2)
    home = send(router, "s", tokens=prompt(1, 64)).engine_id
    other = next(name for name in ("e0", "e1") if name != home)
    for number in range(60):
        router.reserve(home if number < 40 else other, Query(f"x{number}", expected_new_tokens=500))
    assert router.route(Query("s", tokens=prompt(1, 128), expected_new_tokens=500)) == home


def test_a_session_leaves_an_engine_whose_kv_runs_out() -> None:
    router = serving(2)
    home = send(router, "s", tokens=prompt(1, 128)).engine_id
    router.reserve(home, Query("big", tokens=prompt(2, 62_000), expected_new_tokens=1000))
    assert router.route(Query("s", tokens=prompt(1, 192), expected_new_tokens=256)) != home


def test_siblings_go_where_their_prompt_is_as_long_as_slots_are_free() -> None:
    router = serving(4)
    engines = {send(router, f"s{n}", "g", prompt(1, 1024)).engine_id for n in range(8)}
    assert len(engines) == 1


def test_groups_are_dealt_out_evenly_whatever_is_in_flight() -> None:
    router = serving(8)
    homes: Counter[str] = Counter()
    for group in range(48):
        slots = [send(router, f"{group}.{n}", f"g{group}", prompt(group + 1, 1024)) for n in range(8)]
        homes.update({slots[0].engine_id})
        for slot in slots:
            router.end(slot)
    assert set(homes.values()) == {6}


def test_a_group_is_spread_over_two_engines_once_the_slots_are_taken() -> None:
    router = serving(4)
    for number in range(48):
        router.reserve(f"e{number % 4}", Query(f"x{number}", expected_new_tokens=256))
    spread = Counter(send(router, f"s{n}", "g", prompt(1, 1024)).engine_id for n in range(8))
    assert max(spread.values()) == 4
    assert len(spread) == 2


def test_siblings_of_short_prompts_with_long_answers_do_not_clump() -> None:
    router = serving(4, model=EngineModel(slots=64, kv_tokens=10_000_000))
    spread = Counter(send(router, f"s{n}", "g", prompt(1, 128), new=16_000).engine_id for n in range(8))
    assert max(spread.values()) <= 3


def test_a_system_prompt_that_all_share_draws_nobody_to_one_engine() -> None:
    router = serving(8)
    system = prompt(99, 4096)
    loads: Counter[str] = Counter()
    for number in range(64):
        slot = send(router, f"s{number}", tokens=system + prompt(number, 128))
        loads[slot.engine_id] += 1
        router.end(slot)
    assert max(loads.values()) <= 9


def test_m1_new_weights_void_what_the_router_takes_for_cached() -> None:
    router = serving(4)
    slot = send(router, "s", tokens=prompt(1, 1024))
    router.end(slot, generated=50)
    assert router._plan_of(Query("t", tokens=prompt(1, 1024)), None).cached
    router.release(1, [f"e{n}" for n in range(4)], {})
    session = router._memory.session("s")
    assert not router._plan_of(Query("t", tokens=prompt(1, 1024)), None).cached
    assert not router._plan_of(Query("s", tokens=prompt(1, 1100)), session).cached


def test_an_answer_counts_as_cached_for_the_turn_that_follows() -> None:
    router = serving(2)
    slot = send(router, "s", tokens=prompt(1, 100))
    router.end(slot, generated=90)
    cached = router._plan_of(Query("s", tokens=prompt(1, 300)), router._memory.session("s")).cached
    assert list(cached.values()) == [190]


def test_a_restarted_engine_has_forgotten_everything() -> None:
    router = serving(1)
    router.end(send(router, "s", "g", prompt(1, 1024)), generated=10)
    router.leave("e0", "it died")
    router.join(engine(0))
    router.release(0, ["e0"], {})
    assert not router._plan_of(Query("s", tokens=prompt(1, 1024)), router._memory.session("s")).cached


def test_an_old_reservation_weighs_nothing_on_the_engine_that_took_its_place() -> None:
    router = serving(1)
    old = send(router, "s", tokens=prompt(1, 1000))
    router.leave("e0", "it died")
    router.join(engine(7))
    router.release(0, ["e7"], {})
    seat = router._seats["e7"]
    router.end(old, generated=5)
    assert (seat.load, seat.kv, seat.expected) == (0, 0, 0)


def test_a_session_of_an_engine_that_left_goes_to_one_that_serves() -> None:
    router = serving(2)
    old = send(router, "s", tokens=prompt(1, 1000)).engine_id
    router.leave(old, "it died")
    router.join(engine(7))
    router.release(0, ["e7"], {})
    for name in ("e0", "e1", "e7"):
        for number in range(40) if name != old else ():
            router.reserve(name, Query(f"x{name}{number}", expected_new_tokens=100))
    assert router.route(Query("s", tokens=prompt(1, 1100), expected_new_tokens=100)) not in (old, None)


def test_a_dead_engine_is_not_brought_back_by_a_quarantine_and_a_release() -> None:
    router = serving(2)
    router.leave("e0", "it died")
    router.quarantine("e0", "late news")
    router.release(1, ["e0", "e1"], {})
    assert router.engine("e0").state is EngineState.DEAD
    assert router.route(Query("s")) == "e1"


def test_a_draining_engine_ends_what_it_has_and_gets_nothing() -> None:
    router = serving(2)
    slot = send(router, "s")
    router.drain(slot.engine_id)
    assert router.engine(slot.engine_id).state is EngineState.DRAINING
    assert "drained" in router.reasons()[slot.engine_id]
    assert all(router.route(Query(name)) != slot.engine_id for name in ("s", "t", "u"))
    with pytest.raises(RouterError, match="drained"):
        router.reserve(slot.engine_id, Query("t"))
    router.end(slot)


def test_an_engine_that_failed_a_request_is_taken_again_only_where_no_other_serves() -> None:
    router = serving(2)
    home = send(router, "s", "g", prompt(1, 1024)).engine_id
    other = next(name for name in ("e0", "e1") if name != home)
    avoiding = Query("s", "g", prompt(1, 1024), avoid=frozenset({home}))
    assert router.route(avoiding) == other
    router.leave(other, "it died")
    assert router.route(avoiding) == home


def test_an_engine_that_joins_late_is_not_flooded_with_every_new_group() -> None:
    router = serving(3)
    for number in range(60):
        router.end(send(router, f"s{number}"))
    router.join(engine(3))
    router.release(0, [f"e{n}" for n in range(4)], {})
    spread = Counter()
    for number in range(40):
        slot = send(router, f"t{number}")
        spread[slot.engine_id] += 1
        router.end(slot)
    assert max(spread.values()) <= 12
    assert spread["e3"] >= 8


def test_a_prefill_under_way_is_waited_for_only_as_long_as_it_takes() -> None:
    time = 0.0
    router = KvRouter(100, model=MODEL, clock=lambda: time)
    for number in range(2):
        router.join(engine(number))
    router.release(0, ["e0", "e1"], {})
    busy = send(router, "long", tokens=prompt(1, 30_000), new=10).engine_id
    costs = router._fleet.costs(0, 0)
    slot = router._seats[busy].slot
    assert costs[slot] == pytest.approx(30_000 / MODEL.prefill_tokens_per_s)
    time = 10.0
    assert router._fleet.costs(0, 0)[slot] == 0.0


def test_sessions_that_open_with_the_same_prompt_are_siblings_though_nobody_says_so() -> None:
    router = serving(4)
    homes: list[set[str]] = []
    for group in range(1, 17):
        slots = [send(router, f"{group}.{sibling}", tokens=prompt(group, 1024)) for sibling in range(8)]
        homes.append({slot.engine_id for slot in slots})
        for slot in slots:
            router.end(slot)
    assert all(len(engines) == 1 for engines in homes)
    assert Counter(name for engines in homes for name in engines) == {f"e{number}": 4 for number in range(4)}


SEATS = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 6000), st.integers(500, 20_000), st.booleans()), min_size=2, max_size=5
)
"""Of each engine: requests in flight, tokens of each, the rate at which it prefills, is it in service?"""


@given(SEATS, st.integers(0, 8000), st.integers(0, 8000), st.integers(0, 2000), st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None)
def test_where_it_is_dearer_elsewhere_no_engine_is_worth_leaving_for(
    engines: list[tuple[int, int, int, bool]], here: int, elsewhere: int, expected: int, gain: float
) -> None:
    fleet = Fleet(1 << 30, clock=lambda: 0.0)
    seats = []
    for number, (load, kv, prefill, serves) in enumerate(engines):
        seat = fleet.add(f"e{number}", EngineModel(prefill_tokens_per_s=prefill))
        fleet.serve(seat, serves or number == 0)
        for _ in range(load):
            fleet.take(seat, kv, kv, expected)
        seats.append(seat)
    home = seats[0]
    alone = fleet.cost(home, here, expected)
    assert alone == pytest.approx(fleet.costs(here, expected)[home.slot])
    if fleet.dearer_elsewhere(home, here, elsewhere, expected, gain):
        others = fleet.costs(elsewhere, expected)
        assert all(gain * others[seat.slot] >= alone * (1 - 1e-9) for seat in seats[1:])
