"""Advice for the tail: what waits moves first, what runs only where it is worth its prefill."""

from hypothesis import given, settings
from hypothesis import strategies as st
from router_fixtures import prompt, serving

from slimerl.rollout.kv_fleet import EngineModel, Seat
from slimerl.rollout.kv_tail import TAIL_SKEW, InFlight, tail_moves
from slimerl.rollout.router import Query


def fleet(*loads: int, slots: int = 8, tokens: int = 100, expected: int = 30_000) -> list:
    model = EngineModel(slots=slots)
    count = iter(range(1000))
    return [
        (
            Seat(f"e{n}", n, model, serving=True, load=load),
            [InFlight(next(count), tokens, expected) for _ in range(load)],
        )
        for n, load in enumerate(loads)
    ]


def test_what_waits_moves_to_the_engine_that_runs_dry() -> None:
    moves = tail_moves(fleet(12, 2))
    assert [(move.source, move.target, move.queued) for move in moves[:4]] == [("e0", "e1", True)] * 4
    assert [move.number for move in moves[:4]] == [11, 10, 9, 8]  # the youngest wait


def test_nothing_moves_while_every_engine_is_busy() -> None:
    assert tail_moves(fleet(30, 6)) == []


def test_nothing_moves_for_a_small_skew() -> None:
    assert tail_moves(fleet(5, 5 - TAIL_SKEW + 1)) == []


def test_a_running_request_moves_only_where_it_gains_more_than_its_prefill_costs() -> None:
    assert tail_moves(fleet(8, 0, expected=30_000, tokens=100))
    assert not tail_moves(fleet(8, 0, expected=30, tokens=30_000))
    assert not tail_moves(fleet(8, 0), running_too=False)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 16))
@settings(max_examples=100, deadline=None)
def test_moves_never_turn_the_skew_around(loads: list[int], slots: int) -> None:
    after = dict(enumerate(loads))
    for move in tail_moves(fleet(*loads, slots=slots)):
        source, target = int(move.source[1:]), int(move.target[1:])
        assert after[source] - after[target] >= TAIL_SKEW
        after[source] -= 1
        after[target] += 1
    assert sum(after.values()) == sum(loads)


def test_the_router_names_reservations_that_it_holds() -> None:
    router = serving(2)
    for number in range(20):
        router.reserve("e0", Query(f"s{number}", tokens=prompt(number, 64), expected_new_tokens=100))
    moves = router.tail_moves()
    assert moves
    assert all(move.target == "e1" for move in moves)
    assert {move.number for move in moves} <= {one.number for one in router.running()}
