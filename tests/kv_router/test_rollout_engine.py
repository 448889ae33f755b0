"""The simulated engine keeps time by its formula, and its KV within its limit."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slimerl.simulation.rollout_cache import RadixCache
from slimerl.simulation.rollout_engine import EngineRates, Job, SimulatedEngine
from slimerl.simulation.rollout_trace import Segment

RATES = EngineRates(slots=4, kv_tokens=2000, prefill_tokens_per_s=1000.0)


def job(name: str, prompt: int, answer: int, shared: int = 0) -> Job:
    path = (Segment("shared", shared),) if shared else ()
    return Job(name, (*path, Segment(f"{name}/p", prompt)), f"{name}/a", answer, expected=answer)


def run(engine: SimulatedEngine) -> dict[str, float]:
    """Until idle: when each session finished."""
    finished: dict[str, float] = {}
    while (now := engine.next_event()) < math.inf:
        for done in engine.advance(now):
            finished[done.session] = now
    return finished


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    engine = SimulatedEngine("e", RATES)
    engine.submit(job("a", 500, 100))
    prefill = RATES.step_s + 500 / RATES.prefill_tokens_per_s
    read = sum(range(500, 600)) * RATES.step_per_kv_token_s
    decode = 100 * (RATES.step_s + RATES.step_per_request_s) + read
    assert run(engine)["a"] == pytest.approx(prefill + decode, rel=1e-4)


def test_a_batch_shares_the_step_and_finishes_together() -> None:
    engine = SimulatedEngine("e", RATES)
    for name in "abc":
        engine.submit(job(name, 50, 100))
    times = run(engine)
    alone = SimulatedEngine("e", RATES)
    alone.submit(job("a", 50, 100))
    single = run(alone)["a"]
    assert max(times.values()) < 2 * single
    assert engine.decoded_tokens == pytest.approx(300)


def test_more_requests_than_slots_wait() -> None:
    engine = SimulatedEngine("e", RATES)
    for number in range(5):
        engine.submit(job(str(number), 10, 100))
    times = run(engine)
    assert times["4"] > 1.8 * times["1"]


def test_a_shared_prefix_is_prefilled_once() -> None:
    engine = SimulatedEngine("e", RATES)
    for number in range(4):
        engine.submit(job(str(number), 10, 10, shared=300))
    run(engine)
    assert engine.prefilled_tokens == 300 + 4 * 10


def test_the_next_turn_finds_prompt_and_answer_cached() -> None:
    engine = SimulatedEngine("e", RATES)
    engine.submit(job("a", 100, 50))
    run(engine)
    turn = Job("a", (Segment("a/p", 100), Segment("a/a", 50), Segment("a/o", 20)), "a/a1", 10)
    engine.submit(turn)
    run(engine)
    assert (turn.cached, turn.prefilled) == (150, 20)


def test_without_kv_left_the_youngest_is_retracted_and_still_finishes() -> None:
    engine = SimulatedEngine("e", RATES)
    for number in range(4):
        engine.submit(job(str(number), 100, 700))
    times = run(engine)
    assert engine.retracted > 0
    assert len(times) == 4
    assert times["0"] < times["3"]


def test_an_interrupted_request_keeps_its_tokens_and_is_prefilled_with_them() -> None:
    engine = SimulatedEngine("e", RATES)
    running = job("a", 100, 400)
    engine.submit(running)
    engine.advance(engine.next_event())
    engine.advance(1.0)
    engine.interrupt(pause_s=5.0)
    kept = running.generated
    assert 50 < kept < 150
    assert engine.next_event() == pytest.approx(6.0)
    finished = run(engine)["a"]
    assert running.prefilled == 100 + 100 + int(kept)
    assert finished > 6.0 + (400 - kept) * RATES.step_s


def test_a_request_that_is_taken_back_leaves_with_whole_tokens() -> None:
    engine = SimulatedEngine("e", RATES)
    running = job("a", 100, 400)
    engine.submit(running)
    engine.advance(engine.next_event())
    engine.advance(1.0)
    assert engine.may_take_back(running)
    engine.take_back(running)
    assert running.generated == int(running.generated) > 0
    assert engine.load == 0
    assert engine.kv_used == pytest.approx(100 + running.generated)


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 900), st.floats(0, 3)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_job_finishes_with_its_tokens_within_the_kv_limit(jobs: list[tuple[int, int, float]]) -> None:
    engine = SimulatedEngine("e", RATES)
    now = 0.0
    done: list[Job] = []
    for number, (prompt, answer, wait) in enumerate(jobs):
        until = now + wait
        while engine.next_event() <= until:
            now = engine.next_event()
            done += engine.advance(now)
        now = until
        done += engine.advance(now)
        engine.submit(job(str(number), prompt, answer, shared=100))
        assert_kv_within_limit(engine)
    while engine.next_event() < math.inf:
        done += engine.advance(engine.next_event())
        assert_kv_within_limit(engine)
    assert sorted(one.session for one in done) == sorted(str(number) for number in range(len(jobs)))
    assert all(one.generated == one.answer_tokens for one in done)
    assert engine._kv_read == pytest.approx(0, abs=1e-3)
    assert engine._growing == pytest.approx(0, abs=1e-3)
    assert engine.decoded_tokens == pytest.approx(sum(answer for _, answer, _ in jobs), rel=1e-3)


def assert_kv_within_limit(engine: SimulatedEngine) -> None:
    if len(engine.running) + len(engine._prefilling) > 1:
        assert engine.kv_used <= RATES.kv_tokens + 1e-3
    assert len(engine.running) + len(engine._prefilling) <= RATES.slots


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(
    lambda keys: tuple(Segment("".join(keys[: n + 1]), 10 * (n + 1)) for n in range(len(keys)))
)


class CacheAgainstBruteForce(RuleBasedStateMachine):
    """The reference is the set of paths that are cached, from brute-force eviction by last use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache()
        self.locked: list[tuple[object, tuple[Segment, ...]]] = []
        self.used: dict[tuple[Segment, ...], int] = {}
        self.time = 0

    @rule(path=PATHS)
    def lock(self, path: tuple[Segment, ...]) -> None:
        self.locked.append((self.cache.lock(path), path))
        for end in range(1, len(path) + 1):
            self.time += 1
            self.used[path[:end]] = self.time

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(node)  # type: ignore[arg-type]

    @rule(tokens=st.integers(1, 60))
    def evict(self, tokens: int) -> None:
        freed = self.cache.evict(tokens)
        expected = 0
        while expected < tokens:
            ends = [path for path in self.used if self.evictable(path)]
            if not ends:
                break
            oldest = min(ends, key=lambda path: self.used[path])
            del self.used[oldest]
            expected += oldest[-1].length
        assert freed == expected

    def evictable(self, path: tuple[Segment, ...]) -> bool:
        continued = any(other[: len(path)] == path and len(other) > len(path) for other in self.used)
        return not continued and not any(held[: len(path)] == path for _, held in self.locked)

    @rule(path=PATHS)
    def look_up(self, path: tuple[Segment, ...]) -> None:
        cached = 0
        for end in range(1, len(path) + 1):
            if path[:end] not in self.used:
                break
            cached += path[end - 1].length
        assert self.cache.cached(path) == cached

    @invariant()
    def tokens_are_counted(self) -> None:
        assert self.cache.tokens == sum(path[-1].length for path in self.used)


TestCacheAgainstBruteForce = CacheAgainstBruteForce.TestCase
TestCacheAgainstBruteForce.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
