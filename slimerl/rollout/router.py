"""Which engine a request goes to. Pure: no clock, no I/O; the same object serves in process and behind a gateway.

Flows in: engines as they join, change state and leave; queries. Flows out: an engine's id, and reservations.
Invariants: only an engine that is SERVING the required version is chosen, never beyond its capacity; a reservation
is made at dispatch and ended exactly once (finish, abort, disconnect), also when its engine has left meanwhile; an
engine comes (back) into service only by a verified weight update (`release`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from slimerl.rollout.kv_tail import Move
from slimerl.samples.messages import EngineInfo, EngineState
from slimerl.samples.written_ids import Tokens


class RouterError(RuntimeError):
    """An unknown engine or reservation; the message names it."""


class Query(msgspec.Struct, frozen=True):
    """What is known of a request when its engine is chosen. `session`, `group`, `tokens` and `expected_new_tokens`
    are for routers that weigh prefixes and lengths."""

    session: str
    group: str = ""
    tokens: Tokens | None = None
    expected_new_tokens: int = 0
    avoid: frozenset[str] = frozenset()
    """Engines that failed this request already: chosen only where no other is in service."""


class Reservation(msgspec.Struct, frozen=True):
    """One slot of one engine."""

    number: int
    engine_id: str
    session: str


class Router(Protocol):
    """The interface that every policy of choice stands behind."""

    moves: int
    """Requests of a session that went to another engine than the one before, as far as the router knows sessions."""

    @property
    def version(self) -> int:
        """Version that engines must serve; -1 before the first release."""
        ...

    def join(self, engine: EngineInfo) -> None: ...

    def leave(self, engine_id: str, reason: str) -> None: ...

    def release(self, version: int, whole: Iterable[str], dirty: Mapping[str, str]) -> None: ...

    def quarantine(self, engine_id: str, reason: str) -> None: ...

    def route(self, query: Query) -> str | None: ...

    def reserve(self, engine_id: str, query: Query) -> Reservation: ...

    def end(self, reservation: Reservation, generated: int = 0) -> None: ...

    def engine(self, engine_id: str) -> EngineInfo: ...

    def engines(self) -> list[EngineInfo]: ...

    def serving(self) -> Sequence[str]: ...

    def reasons(self) -> dict[str, str]: ...

    def running(self) -> list[Reservation]: ...

    def tail_moves(self, running_too: bool = True) -> list[Move]: ...


@dataclass(slots=True)
class _Engine:
    info: EngineInfo
    load: int = 0
    last_chosen: int = 0
    reason: str = ""
    """Why it is out of service."""


@dataclass
class LeastLoaded:
    """The engine with the fewest running requests; among equals the least recently chosen one."""

    capacity: int
    """Requests in flight per engine."""
    version: int = -1
    moves: int = field(default=0, init=False)
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _running: dict[int, tuple[Reservation, _Engine]] = field(default_factory=dict)
    _count: int = 0

    def join(self, engine: EngineInfo) -> None:
        """Add an engine, JOINING; one of the same id (a restarted engine) is replaced.

        Its old reservations stay to be ended by their holders and weigh nothing on the new engine.
        """
        joining = msgspec.structs.replace(engine, state=EngineState.JOINING, version=-1)
        self._engines[engine.engine_id] = _Engine(joining, last_chosen=self._count)

    def leave(self, engine_id: str, reason: str) -> None:
        """The engine is gone: DEAD, never routed to. It may join again."""
        self._set(engine_id, EngineState.DEAD, reason)

    def quarantine(self, engine_id: str, reason: str) -> None:
        """DIRTY: its weights are not to be trusted until a release names it whole."""
        self._set(engine_id, EngineState.DIRTY, reason)

    def release(self, version: int, whole: Iterable[str], dirty: Mapping[str, str]) -> None:
        """`version` is required from now on: `whole` engines serve it, `dirty` ones (id → reason) are quarantined,
        those that serve an older one become STALE.

        Raises:
            RouterError: an unknown engine, or a version older than the present one; nothing is changed then.
        """
        whole = list(whole)
        if version < self.version:
            raise RouterError(f"version {version} is older than version {self.version}, which is required already")
        for engine_id in (*whole, *dirty):
            self._known(engine_id)
        self.version = version
        for engine_id in whole:
            engine = self._engines[engine_id]
            # An engine that died during the update stays dead, whatever the sender believes.
            if engine.info.state is not EngineState.DEAD:
                engine.info = msgspec.structs.replace(engine.info, state=EngineState.SERVING, version=version)
                engine.reason = ""
        for engine_id, reason in dirty.items():
            if self._engines[engine_id].info.state is not EngineState.DEAD:
                self.quarantine(engine_id, reason)
        for engine in self._engines.values():
            if engine.info.state is EngineState.SERVING and engine.info.version != version:
                engine.info = msgspec.structs.replace(engine.info, state=EngineState.STALE)
                engine.reason = f"holds version {engine.info.version}, version {version} is required"

    def route(self, query: Query) -> str | None:
        """The engine for this request, or None while no serving engine has room."""
        best = self._best(query.avoid)
        if best is None and query.avoid and not self._in_service_beside(query.avoid):
            best = self._best(frozenset())
        return best

    def reserve(self, engine_id: str, query: Query) -> Reservation:
        """Take a slot of an engine that `route` named."""
        engine = self._known(engine_id)
        if engine.info.state is not EngineState.SERVING or engine.load >= self.capacity:
            raise RouterError(f"engine {engine_id} is {engine.info.state} with {engine.load} of {self.capacity} slots")
        self._count += 1
        engine.load += 1
        engine.last_chosen = self._count
        reservation = Reservation(self._count, engine_id, query.session)
        self._running[reservation.number] = (reservation, engine)
        return reservation

    def end(self, reservation: Reservation, generated: int = 0) -> None:
        """Give the slot back; `generated` matters to routers that weigh what is cached. Raises RouterError if it was
        given back already."""
        held = self._running.pop(reservation.number, None)
        if held is None:
            raise RouterError(f"the slot of {reservation.session} on {reservation.engine_id} was given back already")
        held[1].load -= 1

    def engine(self, engine_id: str) -> EngineInfo:
        """Raises RouterError for an unknown id."""
        return self._known(engine_id).info

    def engines(self) -> list[EngineInfo]:
        return [engine.info for engine in self._engines.values()]

    def serving(self) -> Sequence[str]:
        """Engines in service."""
        return [name for name, engine in self._engines.items() if engine.info.state is EngineState.SERVING]

    def reasons(self) -> dict[str, str]:
        """Why each engine that is out of service is so."""
        return {engine_id: engine.reason for engine_id, engine in self._engines.items() if engine.reason}

    def running(self) -> list[Reservation]:
        """Reservations not yet ended, oldest first."""
        return [reservation for reservation, _ in self._running.values()]

    def load(self, engine_id: str) -> int:
        """Requests in flight on an engine."""
        return self._known(engine_id).load

    def tail_moves(self, running_too: bool = True) -> list[Move]:
        """None: of the requests nothing is known but their number, which is even."""
        return []

    def _best(self, avoid: frozenset[str]) -> str | None:
        best: _Engine | None = None
        for engine_id, engine in self._engines.items():
            if engine.info.state is not EngineState.SERVING or engine.load >= self.capacity or engine_id in avoid:
                continue
            if best is None or (engine.load, engine.last_chosen) < (best.load, best.last_chosen):
                best = engine
        return best.info.engine_id if best is not None else None

    def _in_service_beside(self, avoid: frozenset[str]) -> bool:
        return any(
            engine.info.state is EngineState.SERVING and engine_id not in avoid
            for engine_id, engine in self._engines.items()
        )

    def _known(self, engine_id: str) -> _Engine:
        if engine_id not in self._engines:
            raise RouterError(f"unknown engine {engine_id}; known: {', '.join(self._engines) or 'none'}")
        return self._engines[engine_id]

    def _set(self, engine_id: str, state: EngineState, reason: str) -> None:
        engine = self._known(engine_id)
        engine.info = msgspec.structs.replace(engine.info, state=state)
        engine.reason = reason
