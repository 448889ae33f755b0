"""What the KV-aware router believes of each engine, in arrays, so that one decision weighs all engines at once. Pure.

Flows in: engines that take and leave a seat, requests as they are sent and as they end. Flows out: the cost, in
seconds, of sending a request to each engine.

The cost of a seat = waiting time + missing prompt tokens / prefill rate + expected new tokens * slope * running
requests + KV pressure; an engine out of service or without room costs infinitely much.

Invariant: what a request adds to its seat is taken off exactly once, and never from the engine that took the seat
over meanwhile (a seat is an incarnation; its slot number may be given out again).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

KV_FREE_USE = 0.7
"""Share of an engine's KV cache up to which it is not short of KV: the rest serves as prefix cache."""
KV_PRESSURE_S = 2.0
"""Cost of a full KV cache: about the re-prefill of one long request that is retracted for want of KV."""
SHARE_HORIZON = 512
"""Sessions per engine after which a placement has nearly ceased to weigh in its fair share: many groups long, so that
one group more or less is a small part, and short beside a run."""
FAIR_SHARE = 1.05
"""An engine may be given more than its share, where the cost says so, up to so many times the mean."""
PREFILL_WEIGHT = 4.0
"""A prefill delays this request, and all that decode on the engine meanwhile; waiting delays this request alone."""
FULL_S = 1e6
"""Added to the cost of an engine that has its share of a group: it is chosen only where there is no other."""
TIE_S = 1e-3
"""Costs closer than this are a tie: the estimates are coarser."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine is able to do. The defaults suit an 8B to 30B model on one current data-centre GPU; only their
    ratio weighs: how many running requests more are worth the prefill of a prompt."""

    slots: int = 64
    """Requests that decode at once; further ones wait in the engine."""
    kv_tokens: int = 400_000
    prefill_tokens_per_s: float = 15_000.0
    step_s: float = 0.01
    """A decode step of one request."""
    step_per_request_s: float = 2.5e-5
    """Slope: what one more running request adds to a decode step, and so to each token of the others."""
    step_per_kv_token_s: float = 0.0
    """What reading one more token of KV adds to it. Weighs where contexts are long and of unequal length."""


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of an engine."""

    engine_id: str
    slot: int
    model: EngineModel
    serving: bool = False
    load: int = 0
    """Requests in flight."""
    kv: int = 0
    """Tokens of KV that they hold, or will."""
    expected: int = 0
    """Tokens that they are expected to generate."""
    decode_s: float = 0.0
    """What they add to a decode step."""
    closed_s: float = math.inf
    """Waiting for a slot, and KV pressure; infinite where nothing may be sent."""
    gone: bool = False

    @property
    def prefill_s(self) -> float:
        """Weighed seconds per prompt token that is not cached."""
        return PREFILL_WEIGHT / self.model.prefill_tokens_per_s


@dataclass(slots=True)
class Fleet:
    """`capacity`: requests in flight per engine. `clock`: seconds, monotonic; without one waiting time is not
    estimated."""

    capacity: int
    clock: Callable[[], float] | None = None
    seats: list[Seat | None] = field(default_factory=list)
    """By slot."""
    total_load: int = 0
    """Of serving engines."""
    total_slots: int = 0
    serving: int = 0
    least_prefill_s: float = math.inf
    """`Seat.prefill_s` of the fastest engine."""
    _count: int = 0
    _free: list[int] = field(default_factory=list)
    _decode: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """By slot, as the following: the seats' `decode_s`."""
    _closed: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """`closed_s`."""
    _prefill: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """`prefill_s`."""
    _prefilled_at: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """When the prompts that were sent so far will be prefilled."""
    _last_chosen: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _share: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Sessions placed on an engine of late, per decode slot of it."""
    _in_service: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, engine_id: str, model: EngineModel) -> Seat:
        """A seat for an engine, out of service."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        seat = Seat(engine_id, slot, model)
        self.seats[slot] = seat
        self._decode[slot] = 0.0
        self._closed[slot] = np.inf
        self._prefill[slot] = seat.prefill_s
        self.least_prefill_s = min(self.least_prefill_s, seat.prefill_s)
        self._prefilled_at[slot] = 0.0
        self._last_chosen[slot] = self._count
        # As much as the others had: it is not to be flooded with every new group until it has caught up.
        self._share[slot] = self._mean_share()
        self._in_service[slot] = 0.0
        return seat

    def remove(self, seat: Seat) -> None:
        """The engine is gone; its slot may be given to another. What its requests added ends with them."""
        self.serve(seat, False)
        seat.gone = True
        self.seats[seat.slot] = None
        self._free.append(seat.slot)
        self.least_prefill_s = min((other.prefill_s for other in self.seats if other is not None), default=math.inf)

    def serve(self, seat: Seat, serving: bool) -> None:
        """In or out of service."""
        if serving is seat.serving:
            return
        seat.serving = serving
        sign = 1 if serving else -1
        self.serving += sign
        self.total_slots += sign * seat.model.slots
        self.total_load += sign * seat.load
        self._in_service[seat.slot] = float(serving)
        self._price(seat)

    def take(self, seat: Seat, kv: int, missing: int, expected: int) -> None:
        """A request is sent: it holds `kv` tokens until it ends; `missing` of its prompt are to be prefilled."""
        self._count += 1
        self._last_chosen[seat.slot] = self._count
        self._load(seat, 1, kv, expected)
        if self.clock is not None:
            start = max(float(self._prefilled_at[seat.slot]), self.clock())
            self._prefilled_at[seat.slot] = start + missing / seat.model.prefill_tokens_per_s

    def give_back(self, seat: Seat, kv: int, expected: int) -> None:
        """A request has ended; the arguments are those of its `take`."""
        self._load(seat, -1, -kv, -expected)

    def open(self, seat: Seat) -> bool:
        """Serving, and with room for one more."""
        return seat.serving and seat.load < self.capacity

    def costs(self, prompt: int, expected: int) -> np.ndarray:
        """Seconds by slot for a request of `prompt` tokens, none of them cached, and `expected` new ones."""
        costs = self._decode * expected
        costs += self._closed
        if prompt:
            costs += self._prefill * prompt
        if self.clock is not None:
            costs += np.maximum(self._prefilled_at - self.clock(), 0.0)
        return costs

    def cost(self, seat: Seat, missing: int, expected: int) -> float:
        """Seconds, as `costs`, for one engine alone; `missing`: prompt tokens that are not cached there."""
        cost = seat.decode_s * expected + seat.closed_s + seat.prefill_s * missing
        if self.clock is not None:
            cost += max(float(self._prefilled_at[seat.slot]) - self.clock(), 0.0)
        return cost

    def prefill_s(self, slot: int) -> float:
        """Weighed seconds per prompt token that is not cached."""
        return float(self._prefill[slot])

    def dearer_elsewhere(self, seat: Seat, missing: int, missing_elsewhere: int, expected: int, gain: float) -> bool:
        """Would any other engine, were it idle, be more than one `gain`th as dear? Looks at none of them.

        Args:
            missing: prompt tokens that are not cached at `seat`; `missing_elsewhere`: at the engine that has the most.
        """
        return gain * self.least_prefill_s * missing_elsewhere >= self.cost(seat, missing, expected)

    def place(self, seat: Seat, sessions: int) -> None:
        """`sessions` were, or will be, placed on an engine; negative: they went elsewhere after all."""
        if sessions > 0:
            self._share *= (1.0 - 1.0 / (SHARE_HORIZON * max(1, self.serving))) ** sessions
        if not seat.gone:
            self._share[seat.slot] = max(0.0, self._share[seat.slot] + sessions / seat.model.slots)

    def only_fair(self, costs: np.ndarray, sessions: int) -> None:
        """Close all engines that would get more than their share by `sessions` further ones, if that leaves any."""
        mean = self._mean_share()
        most = max(mean, FAIR_SHARE * mean - sessions / max(1.0, self.total_slots / max(1, self.serving)))
        closed = np.where(self._share > most + 1e-9, np.inf, costs)
        if closed.min() < FULL_S:
            costs[:] = closed

    def _mean_share(self) -> float:
        return float(self._share @ self._in_service) / self.serving if self.serving else 0.0

    def least(self, costs: np.ndarray) -> Seat | None:
        """The seat of least cost, among equals the least recently chosen; None where all are infinite."""
        least = costs.min() if costs.size else np.inf
        if least == np.inf:
            return None
        tied = (costs <= least + TIE_S).nonzero()[0]
        slot = tied[0] if tied.size == 1 else tied[self._last_chosen[tied].argmin()]
        return self.seats[slot]

    def _load(self, seat: Seat, requests: int, kv: int, expected: int) -> None:
        seat.load += requests
        seat.kv += kv
        seat.expected += expected
        if seat.gone:
            return
        if seat.serving:
            self.total_load += requests
        self._price(seat)

    def _price(self, seat: Seat) -> None:
        model = seat.model
        if not seat.serving or seat.load >= self.capacity:
            closed_s = math.inf
        elif seat.load < model.slots and seat.kv <= KV_FREE_USE * model.kv_tokens:
            closed_s = 0.0
        else:
            closed_s = self._closed_s(seat)
        if closed_s != seat.closed_s:
            self._closed[seat.slot] = seat.closed_s = closed_s
        self._decode[seat.slot] = seat.decode_s = (
            model.step_per_request_s * seat.load + model.step_per_kv_token_s * seat.kv
        )

    def _closed_s(self, seat: Seat) -> float:
        """Of an engine that is open."""
        model, load = seat.model, seat.load
        closed = 0.0
        short = seat.kv / model.kv_tokens - KV_FREE_USE
        if short > 0:
            closed = KV_PRESSURE_S * short / (1.0 - KV_FREE_USE)
        if load >= model.slots:
            # One slot comes free each time that one of `slots` requests has generated its mean share.
            step = model.step_s + model.step_per_request_s * model.slots
            closed += (load - model.slots + 1) * (seat.expected / load) * step / model.slots
        return closed

    def _grow(self) -> None:
        old = len(self.seats)
        new = max(8, 2 * old)
        self.seats.extend([None] * (new - old))
        self._free.extend(range(new - 1, old - 1, -1))
        for name in ("_decode", "_closed", "_prefill", "_prefilled_at", "_last_chosen", "_share", "_in_service"):
            fill = np.full(new - old, np.inf if name == "_closed" else 0.0)
            setattr(self, name, np.concatenate([getattr(self, name), fill]))
