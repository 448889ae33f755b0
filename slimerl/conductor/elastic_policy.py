"""When a run gets one engine more, or one fewer, by how its steps went. Pure.

Flows in: of each step, how long the trainer waited for samples and how long engines had no request. Flows out: one
more, one fewer, or nothing.
Invariants: the number of engines stays within its bounds; nothing changes before `cooldown_steps` whole steps with the
present engines were seen; under a load that stays the same engines do not come and go, and what does not help is tried
ever less often.

What another number of engines would do follows from the two shares. Of n engines, each busy for the share b of a step,
the requests of the step take n·b of one engine, and so n·b/m of m engines. A trainer that trains meanwhile, since
samples may be stale, waits for what of that is longer than its own work; one that does not, for all of it. What it
waited beyond that it waits for something else, a long answer or a reward, with however many engines.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from slimerl.spec.elastic import ElasticSpec

EXPLAINED = 0.5
"""Part of the trainer's waiting that must be for the work of engines, for another one to be worth it."""
SPARE = 0.5
"""Of `trainer_idle`: what the trainer may be foreseen to wait with one engine fewer. The distance between the two is
what keeps a figure that wavers from bringing back what has just been removed."""
RETRY = 2
"""By so much the time doubles, and again, until a number of engines that was too few is tried again: what was foreseen
for it was wrong before, and a load that stays the same shall not pay for that more than now and then. So it is after an
engine that was added in vain."""
HELPED = 0.5
"""Part of what was foreseen of the engine added last that must have come true, for another one at once: where each
waits for a long answer of its own all are busy, and none helps."""


@dataclass(frozen=True)
class StepLoad:
    """How a step went. `waited`: share of the trainer's time; `idle`: share of the engines' time without a request;
    `engines`: those in service when its samples were complete."""

    step: int
    waited: float
    idle: float
    engines: int


@dataclass(frozen=True)
class Decision:
    """`more`: engines; 1, -1 or 0. `why`: for people; of 0 what stands in the way of one more that is wanted, in the
    same words each time, else nothing."""

    more: int = 0
    why: str = ""


@dataclass(frozen=True)
class Demand:
    """Of the samples of a step on its engines. `waited`, `busy`: shares of the step, of the trainer and of each engine;
    `overlaps`: the trainer trains meanwhile."""

    engines: int
    waited: float
    busy: float
    overlaps: bool

    def for_engines(self, engines: int) -> float:
        """How long the trainer would wait for the work of so many, in steps as long as the present ones."""
        work = self.engines * self.busy / engines
        return max(0.0, work - (1 - self.waited)) if self.overlaps else work

    def waited_with(self, engines: int) -> float:
        """Share of a step that the trainer would wait with so many."""
        for_other_things = max(0.0, self.waited - self.for_engines(self.engines))
        waits = for_other_things + self.for_engines(engines)
        return waits / (1 - self.waited + waits) if waits else 0.0

    def __str__(self) -> str:
        return (
            f"the trainer waited {self.waited:.0%} of its time for samples, engines were idle for {1 - self.busy:.0%} "
            "of theirs"
        )


@dataclass
class ElasticPolicy:
    """`overlaps`: samples may be stale; `steps`: of the run."""

    spec: ElasticSpec
    overlaps: bool
    steps: int
    _engines: int = 0
    """Of which steps are looked at; 0: their number changes."""
    _seen: deque[StepLoad] = field(init=False)
    _too_few: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of engines → how often it was too few, until which step it is taken to be."""
    _hoped: tuple[int, float] = (0, 0.0)
    """With the engine added last: how many they are, how much of a step the trainer waits at most if it helped."""
    _in_vain: int = 0
    """Engines added in a row that did not."""
    _patience: int = 0
    """Steps since that was seen of the last one."""

    def __post_init__(self) -> None:
        self._seen = deque(maxlen=self.spec.cooldown_steps)

    def look(self, load: StepLoad, running: int) -> Decision:
        """After a step. `running`: engines that were started and not ended, whether they serve yet or not."""
        if running != self._engines or load.engines != running:
            # in the step in which engines change, or return, there were sometimes more and sometimes fewer
            self._begin(running if load.engines == running else 0)
            return Decision()
        self._seen.append(load)
        if len(self._seen) < self.spec.cooldown_steps or load.step + self.spec.cooldown_steps > self.steps:
            return Decision()
        waited, idle = (median(getattr(each, share) for each in self._seen) for share in ("waited", "idle"))
        demand = Demand(running, waited, 1 - idle, self.overlaps)
        decision = self._more(demand, load.step) if waited >= self.spec.trainer_idle else self._fewer(demand, load.step)
        if decision.more:
            # also where it then cannot be done: it is not asked for again at once
            self._begin(0)
        return decision

    def _begin(self, engines: int) -> None:
        self._engines = engines
        self._seen.clear()

    def _more(self, demand: Demand, step: int) -> Decision:
        if demand.engines >= self.spec.max:
            return Decision(0, f"the trainer waits for samples, and engine.elastic.max = {self.spec.max} engines run")
        if demand.for_engines(demand.engines) < EXPLAINED * demand.waited:
            return Decision(
                0,
                "the trainer waits for samples, but engines have nothing to do meanwhile: more of them would not help. "
                "Look at long answers, slow rewards, rollout.max_staleness and rollout.max_running_requests",
            )
        if self._was_in_vain(demand):
            return Decision(
                0,
                "the trainer waits for samples, and not much less with the engine that was added last; another one is "
                "tried later",
            )
        times = 1 + self._too_few.get(demand.engines, (0, 0))[0]
        self._too_few[demand.engines] = times, step + self.spec.cooldown_steps * RETRY ** (times + 1)
        foreseen = demand.waited - demand.waited_with(demand.engines + 1)
        self._hoped = demand.engines + 1, demand.waited - HELPED * foreseen
        return Decision(1, str(demand))

    def _was_in_vain(self, demand: Demand) -> bool:
        """The engine added last, and for now that is not forgotten."""
        engines, most = self._hoped
        if demand.engines != engines or demand.waited <= most:
            self._in_vain = self._patience = 0
            return False
        self._patience += 1
        if self._patience <= self.spec.cooldown_steps * RETRY ** (self._in_vain + 2):
            return True
        self._in_vain, self._patience = self._in_vain + 1, 0
        return False

    def _fewer(self, demand: Demand, step: int) -> Decision:
        fewer = demand.engines - 1
        waits = demand.waited_with(fewer) if fewer >= self.spec.min else 1.0
        if 1 - demand.busy < self.spec.engines_idle or waits > SPARE * self.spec.trainer_idle:
            return Decision()
        if any(step < until for engines, (_, until) in self._too_few.items() if engines >= fewer):
            return Decision()
        return Decision(-1, f"{demand}; with {fewer} it would wait {waits:.0%}")
