"""Steps of training on simulated rollouts: generate, train, update the weights, and so on. Pure.

Flows in: groups of conversations, a simulation with its router and policy, the seconds of a training step and of an
update. Flows out: when each step was trained, and on what. When a group starts and which groups a step takes is said
by the real `StalenessGate` and `choose_batch`.

Invariant: a step takes whole groups, none of which is more than `max_staleness` versions behind.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slimerl.rollout.admission import StalenessGate, choose_batch
from slimerl.samples.store import GroupView
from slimerl.simulation.rollout_run import RolloutSimulation
from slimerl.simulation.rollout_trace import Conversation

Group = Sequence[Conversation]


class Pause(StrEnum):
    """What becomes of running requests at an update."""

    RETRACT = "retract"
    """They give their KV back, are prefilled again with the new weights, and go on: partial rollouts."""
    DRAIN = "drain"
    """They end first; nothing else is sent meanwhile."""


@dataclass(frozen=True)
class Failures:
    """An engine dies every so often, one after the other, and is back, empty, after `down_s`; it serves from the next
    update on."""

    every_s: float
    down_s: float


@dataclass(frozen=True)
class Regime:
    """`steps` are trained; groups are admitted as if it went on after them, so that the last step is like any other."""

    groups_per_step: int
    max_staleness: int
    steps: int
    train_s: float
    update_s: float = 2.0
    pause: Pause = Pause.RETRACT
    oversample: float | None = None
    """As `rollout.oversample`."""
    colocated: bool = False
    """Engines share the trainer's GPUs, and stand still while it trains."""
    failures: Failures | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step trained: when its update was released, and what it was made of."""

    released_at: float
    groups: tuple[str, ...]
    staleness: int
    """Of its oldest group."""


@dataclass
class TrainingSimulation:
    """See the module's docstring."""

    rollout: RolloutSimulation
    regime: Regime
    groups: Iterator[Group]
    steps: list[Step] = field(default_factory=list)
    by_group: dict[str, Group] = field(default_factory=dict)
    _views: dict[str, GroupView] = field(default_factory=dict)
    """Of groups in no batch yet, in admission order."""
    _left: Counter[str] = field(default_factory=Counter)
    _training: bool = False

    def __post_init__(self) -> None:
        beyond = self.regime.steps + self.regime.max_staleness + 1
        regime = self.regime
        self._gate = StalenessGate(
            regime.groups_per_step, regime.max_staleness, beyond, version=0, oversample=regime.oversample
        )
        self.rollout.finished = self._finished
        if regime.failures is not None:
            self._fail_later(regime.failures, 0)

    def run(self) -> list[Step]:
        """Train the steps. Raises RuntimeError where nothing happens any more before they are."""
        self._admit()
        self.rollout.run(until=lambda: len(self.steps) >= self.regime.steps)
        if len(self.steps) < self.regime.steps:
            raise RuntimeError(f"stuck after {len(self.steps)} steps with {self.rollout.under_way} under way")
        return self.steps

    def _fail_later(self, failures: Failures, number: int) -> None:
        names = sorted(self.rollout.engines)

        def fail() -> None:
            name = names[number % len(names)]
            if name in self.rollout.engines and len(self.rollout.engines) > 1:
                self.rollout.kill(name)
                self.rollout.at(self.rollout.now + failures.down_s, lambda: self.rollout.add_engine(name))
            self._fail_later(failures, number + 1)

        self.rollout.at(self.rollout.now + failures.every_s, fail)

    def _admit(self) -> None:
        admitted: list[tuple[Group, int]] = []
        while self._gate.may_admit():
            group = next(self.groups)
            name = group[0].group
            admitted.append((group, self._gate.next_batch))
            self._gate.admit()
            self.by_group[name] = group
            self._views[name] = GroupView(name, self._gate.version, ready=False)
            self._left[name] = len(group)
        for group, batch in admitted:
            self.rollout.feed(group, batch)

    def _finished(self, one: Conversation) -> None:
        self._left[one.group] -= 1
        if self._left[one.group]:
            return
        self._gate.accept()
        self._views[one.group] = GroupView(one.group, self._views[one.group].version, ready=True)
        self._train()

    def _train(self) -> None:
        step = len(self.steps)
        if self._training:
            return
        regime = self.regime
        chosen = choose_batch(list(self._views.values()), step, regime.groups_per_step, regime.max_staleness)
        if chosen is None:
            return
        self._training = True
        if regime.colocated:
            self.rollout.stand_still(regime.train_s)
        staleness = step - min(self._views.pop(name).version for name in chosen)
        self.rollout.at(self.rollout.now + regime.train_s, lambda: self._trained(tuple(chosen), staleness))

    def _trained(self, groups: tuple[str, ...], staleness: int) -> None:
        if self.regime.pause is Pause.DRAIN:
            self.rollout.hold(lambda: self._updated(groups, staleness))
        else:
            self._updated(groups, staleness)

    def _updated(self, groups: tuple[str, ...], staleness: int) -> None:
        self.steps.append(Step(self.rollout.now + self.regime.update_s, groups, staleness))
        version = len(self.steps)
        self._training = False
        self._gate.advance(version)
        self.rollout.update(version, self.regime.update_s)
        self._admit()
        self._train()
