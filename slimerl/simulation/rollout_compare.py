"""Policies of rollout side by side, each on the same trace and the same simulated engines. Pure.

Flows in: a policy's description, a trace, rates. Flows out: makespan or throughput, beside what no policy can exceed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from slimerl.rollout.kv_fleet import EngineModel
from slimerl.rollout.kv_router import KvRouter
from slimerl.rollout.lengths import ResponseLengths
from slimerl.rollout.order import LengthOrder
from slimerl.rollout.router import LeastLoaded, Router
from slimerl.simulation.rollout_bounds import Bound, answer_tokens, bound
from slimerl.simulation.rollout_engine import EngineRates
from slimerl.simulation.rollout_order import FirstCome, Order
from slimerl.simulation.rollout_routers import RoundRobin, WholeGroups
from slimerl.simulation.rollout_run import Course, Policy, RolloutSimulation, Tally
from slimerl.simulation.rollout_trace import Conversation, Shape, Trace, draw_trace
from slimerl.simulation.rollout_training import Pause, Regime, Step, TrainingSimulation

UNLIMITED = 1 << 30
"""Requests in flight per engine: what waits, waits in the engine, as behind any HTTP router."""
IN_FLIGHT = 1.25
"""Conversations under way per decode slot: a short queue keeps every slot busy, and the rest waits where it can still
be sent anywhere."""

RouterMaker = Callable[[EngineRates, int, Callable[[], float]], Router]


def least_loaded(rates: EngineRates, siblings: int, clock: Callable[[], float]) -> Router:
    return LeastLoaded(UNLIMITED)


def round_robin(rates: EngineRates, siblings: int, clock: Callable[[], float]) -> Router:
    return RoundRobin(UNLIMITED)


def whole_groups(rates: EngineRates, siblings: int, clock: Callable[[], float]) -> Router:
    return WholeGroups(UNLIMITED)


def kv_aware(rates: EngineRates, siblings: int, clock: Callable[[], float]) -> Router:
    model = EngineModel(
        rates.slots, rates.kv_tokens, rates.prefill_tokens_per_s, rates.step_s, rates.step_per_request_s
    )
    return KvRouter(UNLIMITED, siblings, model, clock=clock)


OrderMaker = Callable[[ResponseLengths], "Order[Course]"]


def first_come(lengths: ResponseLengths) -> "Order[Course]":
    return FirstCome()


def longest_first(lengths: ResponseLengths) -> "Order[Course]":
    return LengthOrder(lengths)


@dataclass(frozen=True)
class Plan:
    """A policy by name. `in_flight`: conversations under way per decode slot; None: all at once. `history`: every
    prompt was answered an epoch before; else nothing is known of any."""

    name: str
    router: RouterMaker
    order: OrderMaker = first_come
    in_flight: float | None = IN_FLIGHT
    history: bool = True
    chunk_tokens: int | None = None
    tail_moves: bool = False
    max_staleness: int = 0
    pause: Pause = Pause.RETRACT
    oversample: float | None = None


MAKESPAN_PLANS = (
    Plan("round robin, all at once", round_robin, in_flight=None),
    Plan("least loaded, all at once", least_loaded, in_flight=None),
    Plan("whole groups, all at once", whole_groups, in_flight=None),
    Plan("KV-aware, all at once", kv_aware, in_flight=None),
    Plan("round robin, first come", round_robin),
    Plan("least loaded, first come", least_loaded),
    Plan("whole groups, first come", whole_groups),
    Plan("KV-aware, first come", kv_aware),
    Plan("KV-aware, probes first", kv_aware, longest_first, history=False),
    Plan("KV-aware, longest first", kv_aware, longest_first),
    Plan("KV-aware, longest first, tail moves", kv_aware, longest_first, tail_moves=True),
)
CHUNK_TOKENS = 4096
"""Of a divided rollout: each chunk re-enters the engine's queue and stops its decoding for a moment."""
NO_QUEUE = 1.0
"""A chunk must not wait behind conversations that have not begun: one straggler late is a whole step late."""


def _stale(
    max_staleness: int, what: str, chunk_tokens: int | None = CHUNK_TOKENS, oversample: float | None = None
) -> Plan:
    name = f"staleness {max_staleness}, KV-aware, longest first, {what}"
    return Plan(
        name,
        kv_aware,
        longest_first,
        NO_QUEUE,
        chunk_tokens=chunk_tokens,
        max_staleness=max_staleness,
        oversample=oversample,
    )


SYNCHRONOUS = Plan("synchronous, round robin", round_robin, in_flight=None)
"""What every speed-up is over."""
DIVIDED = _stale(1, "partial, divided")
TRAINING_PLANS = (
    SYNCHRONOUS,
    Plan("synchronous, KV-aware, longest first", kv_aware, longest_first),
    Plan("staleness 1, round robin, drained", round_robin, max_staleness=1, pause=Pause.DRAIN),
    Plan("staleness 1, round robin, partial", round_robin, max_staleness=1),
    _stale(1, "partial", None),
    DIVIDED,
    _stale(2, "partial, divided"),
)
COLOCATED_PLANS = (
    SYNCHRONOUS,
    _stale(1, "over-sampled 1.25", oversample=1.25),
    _stale(1, "over-sampled 1.5", oversample=1.5),
    _stale(1, "over-sampled 2"),
)
"""On GPUs shared with the trainer: generation ends as soon as the first groups of a batch are complete."""


@dataclass(frozen=True)
class Makespan:
    """All conversations of a trace, once."""

    seconds: float
    bound: Bound
    hit_over_oracle: float
    tally: Tally = field(repr=False)

    @property
    def over_bound(self) -> float:
        return self.seconds / self.bound.makespan_s


@dataclass(frozen=True)
class Throughput:
    """Steps of training, the first `max_staleness + 1` of them left out: they start from nothing."""

    tokens_per_s: float
    bound_tokens_per_s: float
    """Engines at their best rate all the time; where they share the trainer's GPUs, all the time that it does not
    train."""
    steps: Sequence[Step]
    tally: Tally = field(repr=False)

    @property
    def over_bound(self) -> float:
        """Time taken over the time of the bound."""
        return self.bound_tokens_per_s / self.tokens_per_s


def makespan(plan: Plan, trace: Trace, rates: EngineRates, engines: int) -> Makespan:
    """Hand out a whole trace."""
    simulation = _simulation(plan, trace.siblings, rates, engines, trace.conversations)
    simulation.feed(trace.conversations)
    simulation.run()
    hit = simulation.tally.hit_rate / trace.oracle().hit_rate
    return Makespan(simulation.now, bound(trace.conversations, rates, engines), hit, simulation.tally)


def throughput(plan: Plan, shape: Shape, seed: int, rates: EngineRates, engines: int, regime: Regime) -> Throughput:
    """Train `regime.steps` steps; staleness and pause are those of the plan."""
    regime = replace(regime, max_staleness=plan.max_staleness, pause=plan.pause, oversample=plan.oversample)
    groups = regime.groups_per_step * (regime.steps + plan.max_staleness + 1)
    trace = draw_trace(replace(shape, groups=groups), seed)
    by_group = [tuple(group) for _, group in groupby(trace.conversations, key=lambda one: one.group)]
    simulation = _simulation(plan, shape.siblings, rates, engines, trace.conversations)
    training = TrainingSimulation(simulation, regime, iter(by_group))
    steps = training.run()
    first = plan.max_staleness
    measured = [one for step in steps[first + 1 :] for name in step.groups for one in training.by_group[name]]
    seconds = steps[-1].released_at - steps[first].released_at
    best = bound(measured, rates, engines).work_s
    if regime.colocated:
        best += (regime.train_s + regime.update_s) * (len(steps) - first - 1)
    tokens = answer_tokens(measured)
    return Throughput(tokens / seconds, tokens / best, steps, simulation.tally)


def _simulation(
    plan: Plan, siblings: int, rates: EngineRates, engines: int, conversations: Sequence[Conversation]
) -> RolloutSimulation:
    in_flight = UNLIMITED if plan.in_flight is None else round(plan.in_flight * engines * rates.slots)
    lengths = ResponseLengths()
    if plan.history:
        for one in {one.group: one for one in conversations}.values():
            for tokens in one.before:
                lengths.observe(one.group, tokens)
    budget = max(one.answer_tokens for one in conversations)
    policy = Policy(in_flight, plan.order(lengths), plan.chunk_tokens, lengths, budget, tail_moves=plan.tail_moves)
    clock = _Clock()
    simulation = RolloutSimulation(engines, rates, plan.router(rates, siblings, clock), policy)
    clock.simulation = simulation
    return simulation


class _Clock:
    """The simulation's time, for a router that is made before it."""

    simulation: RolloutSimulation | None = None

    def __call__(self) -> float:
        return self.simulation.now if self.simulation is not None else 0.0
