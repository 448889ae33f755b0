"""Simple policies of choice, to compare with. Pure.

They stand behind `slimerl.rollout.router.Router` and keep engines and reservations as `LeastLoaded` does.
"""

from dataclasses import dataclass, field

from slimerl.rollout.router import LeastLoaded, Query, Reservation
from slimerl.samples.messages import EngineState


@dataclass
class RoundRobin(LeastLoaded):
    """One engine after the other, whatever they do."""

    _next: int = 0

    def route(self, query: Query) -> str | None:
        serving = [info.engine_id for info in self.engines() if info.state is EngineState.SERVING]
        for step in range(len(serving)):
            engine_id = serving[(self._next + step) % len(serving)]
            if self.load(engine_id) < self.capacity and engine_id not in query.avoid:
                return engine_id
        return super().route(query) if query.avoid else None

    def reserve(self, engine_id: str, query: Query) -> Reservation:
        serving = [info.engine_id for info in self.engines() if info.state is EngineState.SERVING]
        reservation = super().reserve(engine_id, query)
        self._next = (serving.index(engine_id) + 1) % len(serving)
        return reservation


@dataclass
class WholeGroups(LeastLoaded):
    """All requests of a group go to the engine that its first one went to (the fewest requests), as far as it serves
    and has room: the affinity that prefix-aware routers end up with."""

    _homes: dict[str, str] = field(default_factory=dict)

    def route(self, query: Query) -> str | None:
        home = self._homes.get(query.group)
        if home is not None and home not in query.avoid:
            serves = self.engine(home).state is EngineState.SERVING
            if serves and self.load(home) < self.capacity:
                return home
        return super().route(query)

    def reserve(self, engine_id: str, query: Query) -> Reservation:
        reservation = super().reserve(engine_id, query)
        self._homes.setdefault(query.group, engine_id)
        return reservation
