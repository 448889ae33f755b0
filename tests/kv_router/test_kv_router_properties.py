"""Whatever happens to engines and requests, the KV-aware router keeps its invariants."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from router_fixtures import MODEL, engine, prompt

from slimerl.rollout.kv_memory import Memory
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.prefix_index import hash_blocks
from slimerl.rollout.router import Query, Reservation, RouterError
from slimerl.samples.messages import EngineState

CAPACITY = 3
MEMORY = (4, 12, 3)
"""Bounds on sessions, their blocks, groups: small, so that they are reached."""
ENGINES = st.integers(0, 4)


class RouterOnTrial(RuleBasedStateMachine):
    """`sent` says what every engine incarnation was sent since it became whole: all that it may have cached."""

    def __init__(self) -> None:
        super().__init__()
        self.router = KvRouter(CAPACITY, siblings=4, model=MODEL, memory=Memory(*MEMORY))
        self.live: list[Reservation] = []
        self.sent: dict[str, set[tuple[int, ...]]] = {}
        self.time = 0.0
        self.router._fleet.clock = lambda: self.time

    # --- engines

    @initialize(count=st.integers(1, 5))
    def some_engines_serve(self, count: int) -> None:
        for number in range(count):
            self.join(number)
        self.release(set(range(count)), set(), 0)

    @rule(number=ENGINES)
    def join(self, number: int) -> None:
        self.router.join(engine(number))
        self.sent[f"e{number}"] = set()

    @rule(number=ENGINES)
    def leave(self, number: int) -> None:
        if f"e{number}" in self.sent:
            self.router.leave(f"e{number}", "test")

    @rule(number=ENGINES)
    def quarantine(self, number: int) -> None:
        if f"e{number}" in self.sent:
            self.router.quarantine(f"e{number}", "test")
            self.sent[f"e{number}"] = set()

    @rule(number=ENGINES)
    def drain(self, number: int) -> None:
        if f"e{number}" in self.sent:
            self.router.drain(f"e{number}")

    @rule(whole=st.sets(ENGINES), dirty=st.sets(ENGINES), ahead=st.integers(0, 1))
    def release(self, whole: set[int], dirty: set[int], ahead: int) -> None:
        known = {f"e{number}" for number in whole} & set(self.sent)
        bad = ({f"e{number}" for number in dirty} & set(self.sent)) - known
        before = self.router.version
        self.router.release(max(0, before) + ahead, known, dict.fromkeys(bad, "test"))
        for name in self.sent if self.router.version != before else bad:
            self.sent[name] = set()

    # --- requests

    @rule(
        session=st.sampled_from(["", "a", "b", "c", "d", "e"]),
        group=st.sampled_from(["", "g", "h", "i", "j"]),
        tokens=st.one_of(st.none(), st.tuples(st.integers(1, 4), st.sampled_from([0, 63, 64, 200, 500]))),
        new=st.integers(0, 3000),
        avoid=st.frozensets(ENGINES, max_size=2),
    )
    def request(
        self, session: str, group: str, tokens: tuple[int, int] | None, new: int, avoid: frozenset[int]
    ) -> None:
        ids = prompt(*tokens) if tokens is not None else None
        query = Query(session, group, ids, new, frozenset(f"e{number}" for number in avoid))
        serving = {info.engine_id for info in self.router.engines() if info.state is EngineState.SERVING}
        room = {name for name in serving if self.router.load(name) < CAPACITY}
        chosen = self.router.route(query)
        allowed = room - query.avoid if serving - query.avoid else room
        assert (chosen is not None) == bool(allowed)
        if chosen is None:
            return
        assert chosen in allowed
        assert self.router.engine(chosen).version == self.router.version
        self.live.append(self.router.reserve(chosen, query))
        if ids is not None:
            self.sent[chosen].add(ids)

    @precondition(lambda self: self.live)
    @rule(choice=st.randoms(use_true_random=False), generated=st.integers(0, 300))
    def end(self, choice, generated: int) -> None:  # type: ignore[no-untyped-def]
        reservation = self.live.pop(choice.randrange(len(self.live)))
        self.router.end(reservation, generated)
        with pytest.raises(RouterError, match="given back already"):
            self.router.end(reservation)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.time += seconds

    @rule(number=ENGINES)
    def an_engine_out_of_service_is_refused(self, number: int) -> None:
        name = f"e{number}"
        if name in self.sent and self.state(name) is not EngineState.SERVING:
            with pytest.raises(RouterError, match=name):
                self.router.reserve(name, Query("x"))

    # --- what holds always

    @invariant()
    def reservations_do_not_leak(self) -> None:
        assert sorted(one.number for one in self.router.running()) == sorted(one.number for one in self.live)
        assert sorted(self.router._held) == sorted(one.number for one in self.live)
        fleet = self.router._fleet
        for name, seat in self.router._seats.items():
            own = [held for held in self.router._held.values() if held.seat is seat]
            assert seat.load == len(own) == self.router.load(name)
            assert seat.kv == sum(held.kv for held in own)
            assert seat.expected == sum(held.expected for held in own)
        assert fleet.total_load == sum(seat.load for seat in fleet.seats if seat is not None and seat.serving)
        assert fleet.serving == sum(info.state is EngineState.SERVING for info in self.router.engines())

    @invariant()
    def nothing_counts_as_cached_that_was_not_sent_under_these_weights(self) -> None:
        index = self.router._index
        for name, seat in self.router._seats.items():
            keys = {key for tokens in self.sent[name] for key in hash_blocks(tokens)}
            assert set(index._held[seat.slot].blocks) <= keys
        assert set(index._held) == {seat.slot for seat in self.router._seats.values()}

    @invariant()
    def memory_is_bounded(self) -> None:
        sizes = self.router._memory.sizes()
        assert all(size <= bound for size, bound in zip(sizes, MEMORY, strict=True))
        kept = self.router._memory._sessions.values()
        assert sizes[1] == sum(len(session.keys) for session in kept)
        assert len(self.router._fleet.seats) <= 8

    def state(self, name: str) -> EngineState | None:
        return self.router.engine(name).state if name in self.sent else None


TestRouterOnTrial = RouterOnTrial.TestCase
TestRouterOnTrial.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
