"""The router: only engines in service, never beyond capacity, every slot given back exactly once."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slimerl.rollout.router import LeastLoaded, Query, Reservation, RouterError
from slimerl.samples.messages import EngineInfo, EngineState


def engine(engine_id: str) -> EngineInfo:
    # States that an engine claims for itself count for nothing.
    return EngineInfo(engine_id, f"http://{engine_id}", "key", 1, EngineState.SERVING, 99)


def serving(*engine_ids: str, capacity: int = 4) -> LeastLoaded:
    router = LeastLoaded(capacity)
    for engine_id in engine_ids:
        router.join(engine(engine_id))
    router.release(0, engine_ids, {})
    return router


def send(router: LeastLoaded, avoid: frozenset[str] = frozenset()) -> Reservation:
    query = Query("request", avoid=avoid)
    engine_id = router.route(query)
    assert engine_id is not None
    return router.reserve(engine_id, query)


def test_the_least_loaded_engine_is_chosen_and_ties_go_to_the_least_recently_chosen():
    router = serving("a", "b", "c")
    sent = [send(router) for _ in range(6)]
    assert [one.engine_id for one in sent] == ["a", "b", "c", "a", "b", "c"]
    router.end(sent[1])
    assert send(router).engine_id == "b"
    for one in (sent[2], sent[0]):
        router.end(one)
    # a and c are level; c was chosen longer ago than b's slots, but after a.
    assert send(router).engine_id == "a"


def test_no_engine_takes_more_than_its_capacity():
    router = serving("a", "b", capacity=2)
    for _ in range(4):
        send(router)
    assert router.route(Query("one too many")) is None
    with pytest.raises(RouterError, match="a is serving with 2 of 2 slots"):
        router.reserve("a", Query("forced"))


def test_an_engine_serves_only_after_a_release_names_it_whole():
    router = LeastLoaded(1)
    router.join(engine("a"))
    assert router.engine("a").state is EngineState.JOINING
    assert router.route(Query("early")) is None
    router.release(0, ["a"], {})
    assert router.engine("a").version == 0
    assert router.route(Query("now")) == "a"


def test_w2_a_dirty_engine_is_never_chosen_until_it_is_whole_again():
    router = serving("a", "b")
    router.release(1, ["a"], {"b": "torn"})
    assert {send(router).engine_id for _ in range(4)} == {"a"}
    assert router.reasons() == {"b": "torn"}
    router.release(2, ["a", "b"], {})
    assert send(router).engine_id == "b"
    assert router.reasons() == {}


def test_an_engine_that_missed_a_version_is_stale():
    router = serving("a", "b")
    router.release(1, ["a"], {})
    assert router.engine("b").state is EngineState.STALE
    assert "holds version 0, version 1 is required" in router.reasons()["b"]


def test_an_engine_that_died_during_an_update_stays_dead():
    router = serving("a", "b")
    router.leave("b", "gone")
    router.release(1, ["a", "b"], {})
    assert router.engine("b").state is EngineState.DEAD


def test_a_failed_engine_is_avoided_while_another_is_in_service():
    router = serving("a", "b", capacity=1)
    query = Query("again", avoid=frozenset({"a"}))
    assert router.route(query) == "b"
    router.reserve("b", query)
    assert router.route(query) is None
    router.leave("b", "gone")
    assert router.route(query) == "a"


def test_a_release_that_cannot_be_changes_nothing():
    router = serving("a")
    with pytest.raises(RouterError, match="unknown engine z"):
        router.release(1, ["a", "z"], {})
    with pytest.raises(RouterError, match="version -1 is older than version 0"):
        router.release(-1, ["a"], {})
    assert (router.version, router.engine("a").version) == (0, 0)


def test_a_slot_is_given_back_once_also_after_its_engine_was_replaced():
    router = serving("a")
    sent = send(router)
    router.join(engine("a"))
    router.release(0, ["a"], {})
    send(router)
    router.end(sent)
    assert router.load("a") == 1
    with pytest.raises(RouterError, match="given back already"):
        router.end(sent)


class Traffic(RuleBasedStateMachine):
    """Any order of joins, deaths, releases, requests and ends."""

    ids = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.router = LeastLoaded(capacity=2)
        self.open: list[Reservation] = []
        self.incarnation = dict.fromkeys(self.ids, 0)
        self.of: dict[int, int] = {}
        self.version = -1

    def known(self) -> list[str]:
        return sorted(info.engine_id for info in self.router.engines())

    @rule(engine_id=st.sampled_from(ids))
    def join(self, engine_id: str) -> None:
        self.incarnation[engine_id] += 1
        self.router.join(engine(engine_id))

    @rule(data=st.data())
    @precondition(lambda self: self.known())
    def leave(self, data: st.DataObject) -> None:
        self.router.leave(data.draw(st.sampled_from(self.known())), "gone")

    @rule(data=st.data())
    @precondition(lambda self: self.known())
    def release(self, data: st.DataObject) -> None:
        self.version += data.draw(st.integers(0 if self.version >= 0 else 1, 1))
        whole = data.draw(st.sets(st.sampled_from(self.known())))
        rest = sorted(set(self.known()) - whole)
        dirty = data.draw(st.sets(st.sampled_from(rest))) if rest else set()
        self.router.release(self.version, whole, dict.fromkeys(dirty, "torn"))

    @rule(avoid=st.sets(st.sampled_from(ids)))
    def request(self, avoid: set[str]) -> None:
        query = Query("r", avoid=frozenset(avoid))
        engine_id = self.router.route(query)
        fit = [
            info.engine_id
            for info in self.router.engines()
            if info.state is EngineState.SERVING and info.version == self.version
        ]
        free = [one for one in fit if self.router.load(one) < 2]
        wanted = [one for one in free if one not in avoid]
        if engine_id is None:
            assert not wanted
            assert not free or set(fit) - avoid
            return
        assert engine_id in (wanted or free)
        assert self.router.load(engine_id) == min(map(self.router.load, wanted or free))
        sent = self.router.reserve(engine_id, query)
        self.open.append(sent)
        self.of[sent.number] = self.incarnation[engine_id]

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def end(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.open) - 1))
        self.router.end(self.open.pop(place))

    @invariant()
    def loads_are_the_open_reservations_of_this_incarnation(self) -> None:
        assert self.router.running() == sorted(self.open, key=lambda one: one.number)
        for engine_id in self.known():
            mine = [
                one
                for one in self.open
                if one.engine_id == engine_id and self.of[one.number] == self.incarnation[engine_id]
            ]
            assert self.router.load(engine_id) == len(mine) <= 2


test_a6_no_slot_is_leaked_or_given_twice = Traffic.TestCase
test_a6_no_slot_is_leaked_or_given_twice.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
