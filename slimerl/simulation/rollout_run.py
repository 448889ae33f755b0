"""Conversations on simulated engines through a real router, on a discrete-event clock. Pure.

Flows in: engines, a router, a policy, conversations. Flows out: when each was finished and what the engines did.

Invariants: a request is on an engine only under a reservation of the router, which ends with it; a conversation's
turns follow one another; every conversation that was fed is finished, also where engines fail.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.kv_tail import Move
from slimerl.rollout.lengths import ResponseLengths
from slimerl.rollout.order import Entry, Progress
from slimerl.rollout.router import Query, Reservation, Router
from slimerl.samples.messages import EngineInfo
from slimerl.simulation.rollout_engine import EngineRates, Job, SimulatedEngine
from slimerl.simulation.rollout_order import FirstCome, Order
from slimerl.simulation.rollout_trace import Conversation, Path, Segment, segment_tokens


@dataclass
class Policy:
    """How conversations are handed out.

    `in_flight`: conversations under way at once. `order`: which one is sent next. `chunk_tokens`: generation is
    divided into requests of so many tokens (None: a turn is one request). `lengths`: foretell how long one will be, by
    the name of its group; told of each that ends. `budget_tokens`: that a conversation's answers may have.
    """

    in_flight: int
    order: "Order[Course]" = field(default_factory=FirstCome)
    chunk_tokens: int | None = None
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    budget_tokens: int = 1024
    tool_s: float = 0.0
    """Between an answer and the next turn."""
    tail_moves: bool = False
    """Follow the router's advice for the tail."""


@dataclass(slots=True, eq=False)
class Course:
    """A conversation that waits, or is under way."""

    conversation: Conversation
    path: Path = ()
    tokens: tuple[int, ...] = ()
    """Empty until it is begun."""
    turn: int = 0
    answered: int = 0
    """Tokens of the present turn's answer."""
    done: int = 0
    """Tokens of all its answers."""
    query: Query | None = None
    slot: Reservation | None = None
    job: Job | None = None
    failed_on: frozenset[str] = frozenset()


@dataclass
class Tally:
    """What happened. Token counts of prompts are per turn: a later chunk's re-prefill counts as missing only."""

    requests: Counter[str] = field(default_factory=Counter)
    """By engine."""
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    finished_at: dict[str, float] = field(default_factory=dict)
    moves: int = 0
    """Requests of a conversation that went to another engine than the one before."""
    occupancy: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    """Engine → (time, running, waiting) at each change."""
    generated_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.prefilled_tokens / max(1, self.prompt_tokens)

    @property
    def spread(self) -> float:
        """Most requests of an engine over the mean."""
        return max(self.requests.values()) * len(self.requests) / sum(self.requests.values())


class RolloutSimulation:
    """See the module's docstring. Engines join the router and serve version 0 at the start."""

    def __init__(self, engines: int, rates: EngineRates, router: Router, policy: Policy) -> None:
        self.now = 0.0
        self.router = router
        self.policy = policy
        self.tally = Tally()
        self.engines: dict[str, SimulatedEngine] = {}
        self.finished: Callable[[Conversation], None] = lambda one: None
        self._rates = rates
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()
        self._wakes: Counter[str] = Counter()
        self._held: Callable[[], None] | None = None
        self._open: Counter[str] = Counter()
        """Conversations that are not finished, by group."""
        self._under_way: dict[str, Course] = {}
        self._last: dict[str, str] = {}
        for number in range(engines):
            self.add_engine(f"engine-{number}")
        router.release(0, list(self.engines), {})

    # --- from outside

    def add_engine(self, engine_id: str) -> None:
        """It joins, empty; a release must name it before it serves."""
        self.engines[engine_id] = SimulatedEngine(engine_id, self._rates, _now=self.now)
        self.router.join(EngineInfo(engine_id, f"http://{engine_id}", "", 1))
        self.tally.requests.setdefault(engine_id, 0)
        self.tally.occupancy.setdefault(engine_id, [(self.now, 0, 0)])

    def feed(self, conversations: Iterable[Conversation], batch: int = 0) -> None:
        """Further conversations, whole groups; those of a lower `batch` are due before them."""
        for one in conversations:
            if not self._open[one.group]:
                self.policy.order.admit(one.group, one.group, batch)
            self._open[one.group] += 1
            self._wait(Course(one))
        self.grant()

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (time, next(self._ties), act))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until `until`, or until nothing happens any more."""
        while self._events and not until():
            self.now, _, act = heapq.heappop(self._events)
            act()

    def hold(self, ready: Callable[[], None]) -> None:
        """Send nothing more, and call `ready` once nothing is under way."""
        self._held = ready
        self._if_idle()

    def kill(self, engine_id: str) -> None:
        """The engine dies; its requests are sent again elsewhere, what this turn's request generated is lost."""
        engine = self._advanced(engine_id)
        lost = engine.kill()
        self.router.leave(engine_id, "killed by the simulation")
        del self.engines[engine_id]
        self._note(engine)
        for job in lost:
            self._failed(self._under_way[job.session], engine_id)
        self.grant()

    def update(self, version: int, pause_s: float) -> None:
        """New weights on every engine: what runs is retracted, prefilled again after the pause, and goes on."""
        for engine_id in list(self.engines):
            self._advanced(engine_id).interrupt(pause_s)
            self._wake(engine_id)
        self.router.release(version, list(self.engines), {})
        self.grant()

    def stand_still(self, pause_s: float) -> None:
        """Engines give their memory up for a while; what runs is prefilled again after it."""
        for engine_id in list(self.engines):
            self._advanced(engine_id).interrupt(pause_s)
            self._wake(engine_id)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    # --- requests

    def grant(self) -> None:
        """Send what can be sent, as the order says."""
        order = self.policy.order
        while self._held is None and (entry := order.take()) is not None:
            course = entry.item
            may = course.path or len(self._under_way) < self.policy.in_flight
            if not may or not self._granted(course, entry):
                order.put_back(entry)
                return

    def _granted(self, course: Course, entry: Entry[Course]) -> bool:
        self._begin(course)
        query = course.query or self._query(course)
        engine_id = self.router.route(query)
        if engine_id is None:
            return False
        self.policy.order.sent(entry)
        self._send(course, engine_id, query)
        return True

    def _wait(self, course: Course) -> None:
        one, budget = course.conversation, self.policy.budget_tokens
        progress = Progress(one.group, course.done, max(1, budget - course.done))
        if course.path and not course.done:
            self.policy.order.add(course, "", None)  # it was sent before, and failed
        else:
            self.policy.order.add(course, one.group, progress)

    def _begin(self, course: Course) -> None:
        if course.path:
            return
        one = course.conversation
        course.path = one.opening
        for segment in one.opening:
            course.tokens += segment_tokens(segment.key, 0, segment.length)
        self._under_way[one.session] = course
        self.tally.prompt_tokens += len(course.tokens)

    def _query(self, course: Course) -> Query:
        one = course.conversation
        left = max(1, self.policy.budget_tokens - course.done)
        # of all its turns, which are taken to be alike
        expected = self.policy.lengths.expected(one.group, course.done, left)
        expected = max(1, expected // (len(one.turns) - course.turn))
        if self.policy.chunk_tokens is not None:
            expected = min(expected, self.policy.chunk_tokens)
        course.query = Query(one.session, one.group, course.tokens, expected, course.failed_on)
        return course.query

    def _send(self, course: Course, engine_id: str, query: Query) -> None:
        one = course.conversation
        course.slot = self.router.reserve(engine_id, query)
        left = one.turns[course.turn].answer - course.answered
        answer = min(left, self.policy.chunk_tokens or left)
        key = one.answer_key(course.turn)
        course.job = Job(one.session, course.path, key, answer, course.answered, query.expected_new_tokens)
        self.tally.requests[engine_id] += 1
        self.tally.moves += self._last.get(one.session, engine_id) != engine_id
        self._last[one.session] = engine_id
        engine = self._advanced(engine_id)
        engine.submit(course.job)
        self._wake(engine_id)
        self._note(engine)

    def _done(self, job: Job) -> None:
        """A request is answered: the next chunk, the next turn, or the end."""
        course = self._under_way[job.session]
        one = course.conversation
        self._progress(course, job.answer_tokens)
        key = one.answer_key(course.turn)
        if course.answered < one.turns[course.turn].answer:
            self._wait(course)
            return
        course.path = (*course.path, Segment(key, course.answered))
        course.turn, course.answered = course.turn + 1, 0
        if course.turn == len(one.turns):
            del self._under_way[one.session]
            del self._last[one.session]
            self.tally.finished_at[one.session] = self.now
            self.policy.lengths.observe(one.group, course.done)
            self._open[one.group] -= 1
            if not self._open[one.group]:
                self.policy.order.forget(one.group)
            self.finished(one)
            return
        self.at(self.now + self.policy.tool_s, lambda: self._next_turn(course))

    def _progress(self, course: Course, generated: int) -> None:
        """A request has ended with so many tokens."""
        self._end_slot(course, generated)
        self.tally.generated_tokens += generated
        key, before = course.conversation.answer_key(course.turn), course.answered
        course.answered += generated
        course.done += generated
        course.tokens += segment_tokens(key, before, course.answered)
        course.failed_on = frozenset()

    def _next_turn(self, course: Course) -> None:
        observation = course.conversation.turns[course.turn].observation
        if observation is not None:
            course.path = (*course.path, observation)
            course.tokens += segment_tokens(observation.key, 0, observation.length)
        self.tally.prompt_tokens += len(course.tokens)
        self._wait(course)
        self.grant()

    def _failed(self, course: Course, engine_id: str) -> None:
        self._end_slot(course, 0)
        course.failed_on |= {engine_id}
        self._wait(course)

    def _end_slot(self, course: Course, generated: int) -> None:
        if course.slot is None or course.job is None:
            raise RuntimeError(f"{course.conversation.session} has no request under way")
        self.tally.prefilled_tokens += course.job.prefilled
        end_slot(self.router, course.slot, generated)
        course.slot = course.job = course.query = None

    # --- engines

    def _advanced(self, engine_id: str) -> SimulatedEngine:
        """The engine, at the present time. What finishes exactly now is dealt with."""
        engine = self.engines[engine_id]
        for job in engine.advance(self.now):
            self._done(job)
        return engine

    def _wake(self, engine_id: str) -> None:
        engine = self.engines[engine_id]
        self._wakes[engine_id] += 1
        number, time = self._wakes[engine_id], engine.next_event()
        if time < float("inf"):
            self.at(max(time, self.now), lambda: self._woken(engine, number))

    def _woken(self, engine: SimulatedEngine, number: int) -> None:
        if self._wakes[engine.engine_id] != number or self.engines.get(engine.engine_id) is not engine:
            return
        self._advanced(engine.engine_id)
        self._wake(engine.engine_id)
        self._note(engine)
        self._if_idle()
        self.grant()
        tail = self.policy.tail_moves and not len(self.policy.order)
        if tail and isinstance(self.router, KvRouter):
            for move in self.router.tail_moves():
                self._move(move)

    def _move(self, move: Move) -> None:
        """A request goes on elsewhere, with the tokens that it has."""
        course = next((one for one in self._under_way.values() if one.slot and one.slot.number == move.number), None)
        engine = self._advanced(move.source)
        if course is None or course.job is None or not engine.may_take_back(course.job):
            return
        engine.take_back(course.job)
        self._wake(move.source)
        self._progress(course, int(course.job.generated))
        self._send(course, move.target, self._query(course))

    def _if_idle(self) -> None:
        if self._held is not None and not self.router.running():
            ready, self._held = self._held, None
            ready()

    def _note(self, engine: SimulatedEngine) -> None:
        running = engine.load - len(engine.queue)
        self.tally.occupancy[engine.engine_id].append((self.now, running, len(engine.queue)))


def end_slot(router: Router, slot: Reservation, generated: int) -> None:
    """End a reservation; the router that wants to know what was generated is told."""
    if isinstance(router, KvRouter):
        router.end(slot, generated)
    else:
        router.end(slot)
