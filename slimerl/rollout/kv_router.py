"""Which engine a request goes to, by what each engine has cached and by what it has to do. Pure: no I/O.

Flows in: engines as they join, change state and leave; queries with token ids. Flows out: an engine's id, and
reservations. The engines' states and the reservations themselves are those of `LeastLoaded`; this is another choice.

A session stays where its KV is while that engine is not crowded (`_stays`). Siblings of a group go where their prompt
is, up to a cap per engine (`_homes`). All else goes to the engine of least cost (`kv_fleet`).

Invariants: those of `router`; KV of other weights is never counted as cached; memory is bounded (`kv_memory`,
`prefix_index`); what a request adds to its engine ends with its reservation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from slimerl.rollout.kv_fleet import FULL_S, EngineModel, Fleet, Seat
from slimerl.rollout.kv_memory import Group, Memory, Session
from slimerl.rollout.kv_plan import Plan, plan_of
from slimerl.rollout.kv_tail import InFlight, Move, evens_out, may_be_tail, tail_moves
from slimerl.rollout.prefix_index import BLOCK_TOKENS, PrefixIndex
from slimerl.rollout.router import LeastLoaded, Query, Reservation, RouterError
from slimerl.samples.messages import EngineInfo, EngineState

PIN_SLOTS = 2
"""A session stays on an engine of so few requests whatever the others do: there is nothing to gain elsewhere."""
PIN_LOAD = 1.25
"""... and on one of up to so many times the mean load: below that, moving costs more prefill than it saves decode."""
PIN_KV_USE = 0.9
"""An engine whose KV is used to this degree is about to retract requests: its sessions are weighed anew."""
MOVE_GAIN = 1.5
"""Leaving a crowded engine must be so many times cheaper than staying: the estimates are coarse, and the siblings that
are weighed at the same time must not all leave."""
SATURATED_LOAD = 0.75
"""Share of all decode slots in use from which a group is spread over two engines: below, one engine takes a whole
group without making it wait; above, a group of long answers would keep one engine busy while others run dry."""
SPREAD_WHEN_SATURATED = 2
"""Each further engine prefills the prompt once more; two keep 0.97 of the hits and halve the clumping."""
HOME_SLOTS = 0.75
"""A sibling follows its group to an engine that decodes with at most this share of its slots ..."""
HOME_LOAD = 1.25
"""... or whose load is at most so many times the mean ..."""
WORTH = 0.005
"""... if that saves at least this share of the time that it will decode: less is not worth long answers of one group
clumping on one engine."""


class _Held(msgspec.Struct, frozen=True):
    """What a reservation added to its seat."""

    seat: Seat
    kv: int
    prompt: int
    expected: int
    version: int


class KvRouter:
    """`slimerl.rollout.router.Router`, aware of prefixes.

    Args:
        capacity: requests in flight per engine.
        siblings: sessions of a group.
        model: what each engine is able to do; `models` overrides it per engine id.
        clock: seconds, monotonic, for the estimate of the prefill still to be done; None: no such estimate.
        memory: bounds of what is remembered of sessions and groups.
    """

    def __init__(
        self,
        capacity: int,
        siblings: int = 8,
        model: EngineModel | None = None,
        models: Mapping[str, EngineModel] | None = None,
        clock: Callable[[], float] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.siblings = siblings
        self.moves = 0
        self.version = -1
        """Version that engines must serve; -1 before the first release."""
        self._roster = LeastLoaded(capacity)
        self._fleet = Fleet(capacity, clock)
        self._model = model or EngineModel()
        self._models = dict(models or {})
        self._index = PrefixIndex()
        self._memory = memory or Memory()
        self._seats: dict[str, Seat] = {}
        self._draining: set[str] = set()
        self._held: dict[int, _Held] = {}
        self._plan: Plan | None = None
        self._in_service: tuple[str, ...] = ()

    # --- engines

    def join(self, engine: EngineInfo) -> None:
        """Add an engine, JOINING; one of the same id (a restarted engine) is replaced, its cache forgotten."""
        self._roster.join(engine)
        self._vacate(engine.engine_id)
        model = self._models.get(engine.engine_id, self._model)
        seat = self._seats[engine.engine_id] = self._fleet.add(engine.engine_id, model)
        self._index.add(seat.slot, self._blocks(seat))

    def leave(self, engine_id: str, reason: str) -> None:
        """The engine is gone: DEAD, never routed to. It may join again."""
        self._roster.leave(engine_id, reason)
        self._vacate(engine_id)

    def quarantine(self, engine_id: str, reason: str) -> None:
        """DIRTY until a release names it whole; its cache is not to be trusted either. A dead engine stays dead."""
        if self._roster.engine(engine_id).state is EngineState.DEAD:
            return
        self._roster.quarantine(engine_id, reason)
        self._settle()

    def drain(self, engine_id: str) -> None:
        """Nothing new is sent to the engine; what runs there ends there. Ends when it joins again."""
        self._roster.engine(engine_id)
        self._draining.add(engine_id)
        self._settle()

    def release(self, version: int, whole: Iterable[str], dirty: Mapping[str, str]) -> None:
        """As `LeastLoaded.release`; all KV of an older version is forgotten."""
        self._roster.release(version, whole, dirty)
        self.version = version
        self._plan = None
        if version != self._index.version:
            self._index.renew(version)
        self._settle()

    def engine(self, engine_id: str) -> EngineInfo:
        """Raises RouterError for an unknown id."""
        return self._seen(self._roster.engine(engine_id))

    def engines(self) -> list[EngineInfo]:
        return [self._seen(info) for info in self._roster.engines()]

    def serving(self) -> Sequence[str]:
        """Engines in service, but for those that are drained."""
        return self._in_service

    def reasons(self) -> dict[str, str]:
        """Why each engine that is out of service is so."""
        reasons = self._roster.reasons()
        reasons.update({name: "it is being drained" for name in self._draining if name not in reasons})
        return reasons

    # --- requests

    def route(self, query: Query) -> str | None:
        """The engine for this request, or None while no serving engine has room."""
        session = self._memory.session(query.session)
        if session is not None and session.seat is not None and self._stays(session.seat, query):
            return session.seat.engine_id
        seat = self._choose(query, session, query.avoid)
        if seat is None and query.avoid and self._all_avoided(query.avoid):
            seat = self._choose(query, session, frozenset())
        return seat.engine_id if seat is not None else None

    def reserve(self, engine_id: str, query: Query) -> Reservation:
        """Take a slot of an engine that `route` named.

        Raises:
            RouterError: the engine is unknown, not in service, or full.
        """
        if engine_id in self._draining:
            raise RouterError(f"engine {engine_id} is being drained: nothing new is sent to it")
        seat = self._seats.get(engine_id)
        if seat is None:
            raise RouterError(f"engine {engine_id} is not there: {self.reasons().get(engine_id, 'it never joined')}")
        reservation = self._roster.reserve(engine_id, query)
        session = self._memory.session(query.session)
        plan = self._plan
        if plan is None or plan.query is not query:
            plan = self._plan_of(query, session, seat.slot)
        self._plan = None
        expected = query.expected_new_tokens
        cached = min(plan.cached.get(seat.slot, 0), plan.prompt)
        shared = cached
        if session is not None and session.seat is seat and session.version == self.version:
            shared = min(session.shared, plan.prompt)
        kv = plan.prompt - shared + expected
        self._fleet.take(seat, kv, plan.prompt - cached, expected)
        self._held[reservation.number] = _Held(seat, kv, plan.prompt, expected, self.version)
        self._index.insert(seat.slot, self.version, plan.keys)
        if query.session:
            if session is None:
                self._place(plan.group, seat)
            elif session.seat is not seat:
                self.moves += 1
            session = self._memory.sent(query.session, plan.group, plan.keys, seat)
            session.version, session.held, session.shared = self.version, plan.prompt, shared
        return reservation

    def end(self, reservation: Reservation, generated: int = 0) -> None:
        """Give the slot back. `generated`: tokens that the engine has cached now behind the prompt.

        Raises:
            RouterError: it was given back already.
        """
        self._roster.end(reservation)
        held = self._held.pop(reservation.number)
        self._fleet.give_back(held.seat, held.kv, held.expected)
        session = self._memory.session(reservation.session) if generated else None
        if session is not None and session.seat is held.seat and session.version == held.version:
            session.held = max(session.held, held.prompt + generated)

    def running(self) -> list[Reservation]:
        """Reservations not yet ended, oldest first."""
        return self._roster.running()

    def load(self, engine_id: str) -> int:
        """Requests in flight on an engine."""
        return self._roster.load(engine_id)

    def tail_moves(self, running_too: bool = True) -> list[Move]:
        """Advice for the tail of a rollout (`kv_tail`), to be followed at once or not at all."""
        in_flight: dict[Seat, list[InFlight]] = {seat: [] for seat in self._seats.values() if seat.serving}
        if not in_flight or not may_be_tail(in_flight):
            return []
        for number, held in self._held.items():
            if held.seat in in_flight:
                in_flight[held.seat].append(InFlight(number, held.prompt, held.expected, held.kv))
        return tail_moves(list(in_flight.items()), running_too)

    # --- choice

    def _stays(self, seat: Seat, query: Query) -> bool:
        """Does a session stay on the engine that has its KV, without weighing others?"""
        fleet = self._fleet
        if not fleet.open(seat) or seat.engine_id in query.avoid:
            return False
        if seat.kv > PIN_KV_USE * seat.model.kv_tokens:
            return False
        return seat.load <= PIN_SLOTS or seat.load * fleet.serving <= PIN_LOAD * fleet.total_load

    def _all_avoided(self, avoid: frozenset[str]) -> bool:
        """Is no engine in service but those?"""
        return all(not seat.serving or name in avoid for name, seat in self._seats.items())

    def _choose(self, query: Query, session: Session | None, avoid: frozenset[str]) -> Seat | None:
        plan = self._plan = self._plan_of(query, session)
        fleet = self._fleet
        if session is not None and session.seat is not None and self._rests(session, session.seat, plan, avoid):
            return session.seat
        costs = fleet.costs(plan.prompt, query.expected_new_tokens)
        for slot, tokens in plan.cached.items():
            costs[slot] -= tokens * fleet.prefill_s(slot)
        for engine_id in avoid:
            if engine_id in self._seats:
                costs[self._seats[engine_id].slot] = np.inf
        if session is not None and session.seat is not None and not session.seat.gone:
            return self._for_session(session, session.seat, costs, plan)
        group = self._memory.group(plan.group) if plan.group else None
        if group is not None:
            home = self._home(group, costs, plan)
            if home is not None:
                return home
        if not self._saturated():
            fleet.only_fair(costs, self._cap() if plan.group else 1)
        return fleet.least(costs)

    def _home(self, group: Group, costs: np.ndarray, plan: Plan) -> Seat | None:
        """The engine of its group that a new sibling joins, if any; engines that have their share are priced out."""
        cap = self._cap()
        best: Seat | None = None
        for seat, count in group.spread.items():
            if seat.gone or costs[seat.slot] == np.inf:
                continue
            if count >= cap:
                costs[seat.slot] += FULL_S
            elif best is None or costs[seat.slot] < costs[best.slot]:
                best = seat
        if best is None or self._crowded(best):
            return None
        model = best.model
        # Without token ids, siblings are taken to share something worth it.
        saved = plan.cached.get(best.slot, 0) / model.prefill_tokens_per_s if plan.prompt else np.inf
        return best if saved >= WORTH * plan.query.expected_new_tokens * model.step_s else None

    def _crowded(self, seat: Seat) -> bool:
        fleet = self._fleet
        return seat.load > max(HOME_SLOTS * seat.model.slots, HOME_LOAD * fleet.total_load / fleet.serving)

    def _for_session(self, session: Session, seat: Seat, costs: np.ndarray, plan: Plan) -> Seat | None:
        """A session that is not to stay unasked moves where it gains by it, to an engine that has a slot for it: from
        one queue to another there is nothing to gain."""
        best = self._fleet.least(costs)
        if best is None or costs[seat.slot] == np.inf:
            return best
        if best is not seat and best.load < best.model.slots and MOVE_GAIN * costs[best.slot] < costs[seat.slot]:
            return best
        between_chunks = session.held == plan.prompt
        return (self._evened_out(seat, costs, plan) if between_chunks else None) or seat

    def _rests(self, session: Session, seat: Seat, plan: Plan, avoid: frozenset[str]) -> bool:
        """As `_for_session`, where it can be told without weighing: the others would have to prefill too much. Between
        chunks there is more to a move than its cost."""
        if session.held == plan.prompt or not self._fleet.open(seat) or seat.engine_id in avoid:
            return False
        elsewhere = max((tokens for slot, tokens in plan.cached.items() if slot != seat.slot), default=0)
        missing = plan.prompt - plan.cached.get(seat.slot, 0)
        expected = plan.query.expected_new_tokens
        return self._fleet.dearer_elsewhere(seat, missing, plan.prompt - elsewhere, expected, MOVE_GAIN)

    def _evened_out(self, seat: Seat, costs: np.ndarray, plan: Plan) -> Seat | None:
        """In the tail of a rollout all that stay gain as well: the engine that runs dry, where that is worth it. Not
        between turns, when loads go up and down anyway."""
        if self._saturated():
            return None
        others = [each for each in self._seats.values() if each is not seat and costs[each.slot] < FULL_S]
        driest = min(others, key=lambda each: each.load, default=None)
        if driest is None:
            return None
        missing = plan.prompt - plan.cached.get(driest.slot, 0)
        return driest if evens_out(seat, driest, plan.query.expected_new_tokens, missing) else None

    def _place(self, name: str, seat: Seat) -> None:
        """Count a new session; the first of a group at an engine stands for the siblings that will follow it."""
        group = self._memory.group_of(name) if name else None
        if group is None:
            self._fleet.place(seat, 1)
            return
        if group.promised[seat] > 0:
            group.promised[seat] -= 1
            return
        for other, count in group.promised.items():
            if count > 0:
                self._fleet.place(other, -1)
                group.promised[other] -= 1
                break
        started = sum(group.spread.values()) + sum(group.promised.values())
        follow = max(0, min(self._cap(), self.siblings - started) - 1)
        self._fleet.place(seat, 1 + follow)
        group.promised[seat] += follow

    def _saturated(self) -> bool:
        return self._fleet.total_load >= SATURATED_LOAD * self._fleet.total_slots

    def _cap(self) -> int:
        """Siblings of a group per engine."""
        return -(-self.siblings // (SPREAD_WHEN_SATURATED if self._saturated() else 1))

    def _plan_of(self, query: Query, session: Session | None, at: int | None = None) -> Plan:
        return plan_of(query, session, self._memory, self._index, self.version, at)

    # --- states

    def _vacate(self, engine_id: str) -> None:
        self._draining.discard(engine_id)
        seat = self._seats.pop(engine_id, None)
        if seat is not None:
            self._index.drop(seat.slot)
            self._fleet.remove(seat)
        self._plan = None
        self._note_service()

    def _settle(self) -> None:
        """Take the roster's states over; what is not to be trusted holds nothing."""
        self._plan = None
        for info in self._roster.engines():
            seat = self._seats.get(info.engine_id)
            if seat is None:
                continue
            self._fleet.serve(seat, info.state is EngineState.SERVING and info.engine_id not in self._draining)
            if info.state in (EngineState.DIRTY, EngineState.STALE):
                self._index.add(seat.slot, self._blocks(seat))
        self._note_service()

    def _note_service(self) -> None:
        self._in_service = tuple(name for name, seat in self._seats.items() if seat.serving)

    def _blocks(self, seat: Seat) -> int:
        return max(1, seat.model.kv_tokens // BLOCK_TOKENS)

    def _seen(self, info: EngineInfo) -> EngineInfo:
        if info.state is EngineState.SERVING and info.engine_id in self._draining:
            return msgspec.structs.replace(info, state=EngineState.DRAINING)
        return info
