"""Figures of a step that say that something is wrong: one table of bounds, each with its reason.

Flows in: the figures of each step, in order. Flows out: a line and an event in the run's log for each that is out of
bounds, and `alarm/NAME` in the metrics with the value that was. Nothing is stopped: what is certain to be wrong is an
error elsewhere; what is here may have a good reason.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import median
from typing import Protocol

from slimerl.telemetry.slopes import robust_slope
from slimerl.training.clock import Log
from slimerl.training.stragglers import FACTOR

REMEMBERED_STEPS = 100
"""The past that a bound may refer to."""

REMINDER_STEPS = 20
"""An alarm that lasts is said again after so many steps; the metrics have it in each."""

STALENESS = "rollout/staleness_max"


class Bound(Protocol):
    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        """How the value is out of bounds, for a message; empty: it is not.

        Args:
            earlier: of the steps before, oldest first, at most `REMEMBERED_STEPS`.
            dtype: "fp32" or "bf16", that of the weights.
        """
        ...


@dataclass(frozen=True)
class AtMost:
    """A fixed bound, which may depend on the precision of the weights."""

    bound: float | Mapping[str, float]

    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        bound = self.bound if isinstance(self.bound, float) else self.bound[dtype]
        return f"{value:.3g}, above {bound:g}" if value > bound else ""


@dataclass(frozen=True)
class NearOne:
    """Within `within` of 1."""

    within: Mapping[str, float]

    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        within = self.within[dtype]
        return f"{value:.4g}, more than {within:g} from 1" if abs(value - 1) > within else ""


@dataclass(frozen=True)
class NoSpike:
    """At most `factor` times the median of the steps before, once there are `least` of them."""

    factor: float
    least: int = 8

    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        if len(earlier) < self.least:
            return ""
        usual = median(earlier)
        return (
            f"{value:.3g}, {value / usual:.0f} times the usual {usual:.3g}" if value > self.factor * usual > 0 else ""
        )


@dataclass(frozen=True)
class NoCollapse:
    """At least `share` of the median of the remembered steps, once there are `least` of them."""

    share: float
    least: int = 8

    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        if len(earlier) < self.least:
            return ""
        usual = median(earlier)
        return f"{value:.2g}, {value / usual:.1%} of the usual {usual:.2g}" if value < self.share * usual else ""


@dataclass(frozen=True)
class NoGrowth:
    """Over the remembered steps it grows by no more than `share` of itself and no more than `floor`.

    The slope is the median over all pairs of steps: a jump, after which it stays, is no growth.
    """

    share: float
    floor: float
    least: int = 50

    def broken_by(self, value: float, earlier: Sequence[float], dtype: str) -> str:
        values = [*earlier, value]
        if len(values) < self.least:
            return ""
        grown = robust_slope(range(len(values)), values) * len(values)
        too_much = grown > max(self.floor, self.share * median(values))
        return f"{value:.3g}, grown by {grown:.2g} in {len(values)} steps" if too_much else ""


@dataclass(frozen=True)
class Alarm:
    """`figure`: a name of the metrics, or a pattern with `*`; `reason`: why the bound is what it is; `remedy`: what an
    alarm may mean and what to do; `same_weights`: looked at only where the samples are of the present weights, and
    `of_groups`: where advantages come from comparing the samples of a group."""

    name: str
    figure: str
    bound: Bound
    reason: str
    remedy: str
    same_weights: bool = False
    of_groups: bool = False


ALARMS = (
    Alarm(
        "agreement_mean",
        "agreement/mean_abs_logprob_delta",
        AtMost({"fp32": 1e-3, "bf16": 0.1}),
        "fp32 on one kind of hardware gives about 1e-6; bf16 kernels of two programs differ by some hundredths",
        "engine and trainer disagree about the same weights: is the temperature the same, and the sync verified?",
        same_weights=True,
    ),
    Alarm(
        "agreement_max",
        "agreement/max_abs_logprob_delta",
        AtMost({"fp32": 0.05, "bf16": 1.5}),
        "the worst of 1,000 tokens is about 1e-5 in fp32 and 0.3 in bf16 (SmolLM2); improbable tokens move by more",
        "a few tokens are scored differently: look at the first and last positions, and at special tokens",
        same_weights=True,
    ),
    Alarm(
        "agreement_ratio",
        "agreement/mean_ratio",
        NearOne({"fp32": 0.01, "bf16": 0.1}),
        "over tokens drawn as the engine reports, trainer / engine has the mean 1, whatever the temperature of either",
        "the engine samples from fewer tokens than the trainer knows, or not as it reports: top-p, top-k, bias?",
        same_weights=True,
    ),
    Alarm(
        "clipped",
        "train/clip_fraction",
        AtMost(0.5),
        "PPO's clip is meant for the tail; where it cuts off most tokens, the step is not the one that was asked for",
        "lower training.optimizer.lr or training.minibatches_per_step",
    ),
    Alarm(
        "correction_truncated",
        "train/correction_truncated",
        AtMost(0.1),
        "the cap is for outliers; a tenth of the tokens beyond it means that the samples are of another policy",
        "lower rollout.max_staleness, or look at agreement/…",
    ),
    Alarm(
        "correction_masked",
        "train/correction_masked",
        AtMost(0.1),
        "a masked token teaches nothing and still counts; beyond a tenth of them the step is smaller than it looks",
        "lower rollout.max_staleness, look at agreement/…, or widen the bounds of algorithm.correction",
    ),
    Alarm(
        "routing_unrecorded",
        "train/routing_unrecorded",
        AtMost(0.1),
        "engines tell of every token but those of a request that was cut off in its queue",
        "these tokens are routed anew, not replayed: look for aborted requests in the rollout role's log",
    ),
    Alarm(
        "gradient_spike",
        "train/grad_norm",
        NoSpike(factor=10.0),
        "norms of neighbouring steps differ by a factor of two or three; ten comes from a broken batch or a divergence",
        "look at the samples of this step; lower training.optimizer.lr if it comes again",
    ),
    Alarm(
        "entropy_collapse",
        "train/entropy",
        NoCollapse(share=0.1),
        "a policy that learns loses entropy step by step; a tenth of what it had within the remembered steps is a fall",
        "the policy explores no more: lower training.optimizer.lr, or raise algorithm.clip_high",
    ),
    Alarm(
        "no_gradient",
        "rollout/uniform_groups_fraction",
        AtMost(0.999),
        "rewards that are equal in every group give an advantage of zero to every token",
        "the step taught nothing: the prompts are too easy or too hard, or the reward is broken",
        of_groups=True,
    ),
    Alarm(
        "event_loop_lag",
        "rollout/event_loop_lag_s",
        AtMost(1.0),
        "every request of the rollout role waits as long; a busy machine alone causes some tenths",
        "work that keeps the rollout role's event loop busy belongs off it; or the machine has too few cores",
    ),
    Alarm(
        "straggler",
        "straggler/rank_*",
        AtMost(FACTOR),
        "balanced ranks differ by some percent; every step takes as long as its slowest rank",
        "the others wait for this rank: look at its machine (clock, temperature, other programs, links), or exclude it",
    ),
    Alarm(
        "checkpoint_failed",
        "checkpoint/failed",
        AtMost(0.0),
        "a run that ends early goes on from the newest checkpoint: what it has done since then is at stake",
        "the trainer's log says why: make room on the disk of checkpoints/, or mend what else keeps it from writing",
    ),
    Alarm(
        "local_checkpoint_failed",
        "checkpoint/local_failed",
        AtMost(0.0),
        "a restart goes on from an older local checkpoint, or from the shared one, and does more steps anew",
        "the trainer's log says why and on which rank: make room in checkpoint.local_dir of that node",
    ),
    Alarm(
        "memory_growth",
        "memory/*_rss_gib",
        NoGrowth(share=0.05, floor=0.05),
        "allocators settle within some tens of steps; 5 % in 100 steps doubles the process in 1,400",
        "it leaks: see the memory of each role in the trace and in the metrics memory/…",
    ),
    Alarm(
        "descriptor_growth",
        "process/*_fds",
        NoGrowth(share=0.05, floor=10.0),
        "connections come and go; ten more in 100 steps, steadily, ends at the limit of open files",
        "files or sockets are not closed: compare `ls -l /proc/PID/fd` over time",
    ),
)


class Alarms:
    """Remembers the past steps and looks at each new one."""

    def __init__(self, dtype: str, log: Log, compares_groups: bool = True) -> None:
        self._dtype, self._log, self._compares_groups = dtype, log, compares_groups
        self._earlier: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED_STEPS))
        self._said: dict[tuple[str, str], int] = {}
        """Alarms that are raised now, with their figure, and the step at which the log last had them."""
        self._engine_compared = False

    def check(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        """`alarm/NAME` for each figure that is out of bounds; where a pattern fits several, the largest."""
        self._compare_engine(step, figures)
        found: dict[str, float] = {}
        for alarm in ALARMS:
            if alarm.same_weights and figures.get(STALENESS, 0.0) > 0:
                continue
            if alarm.of_groups and not self._compares_groups:
                continue
            for figure in (name for name in figures if fnmatch(name, alarm.figure)):
                value, earlier = figures[figure], self._earlier[figure]
                broken = alarm.bound.broken_by(value, earlier, self._dtype)
                if broken:
                    self._say(step, alarm, figure, broken)
                    found[f"alarm/{alarm.name}"] = max(value, found.get(f"alarm/{alarm.name}", value))
                else:
                    self._said.pop((alarm.name, figure), None)
                earlier.append(value)
        return found

    def _say(self, step: int, alarm: Alarm, figure: str, broken: str) -> None:
        last = self._said.get((alarm.name, figure))
        if last is None or step >= last + REMINDER_STEPS:
            self._log.event(step, "alarm", alarm.name, f"{figure} is {broken}; {alarm.remedy}")
            self._said[alarm.name, figure] = step

    def _compare_engine(self, step: int, figures: Mapping[str, float]) -> None:
        """The log says how far engine and trainer are apart on the first batch, which nothing has been learnt from."""
        if self._engine_compared or "agreement/mean_ratio" not in figures:
            return
        self._engine_compared = True
        mean, highest, ratio = (
            figures[f"agreement/{name}"] for name in ("mean_abs_logprob_delta", "max_abs_logprob_delta", "mean_ratio")
        )
        text = f"engine against trainer: mean |Δlogprob| {mean:.2g}, largest {highest:.2g}, mean ratio {ratio:.6f}"
        self._log.event(step, "note", "first_batch", text)
