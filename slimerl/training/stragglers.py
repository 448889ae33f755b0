"""Which rank the others wait for: the seconds of each rank's own work, compared over all ranks in every step.

Flows in: seconds of phases in which no rank waits for another. Flows out: `straggler/…` figures, the same on every
rank; a rank that is far above the median raises an alarm (`alarms.py`), which names it.
Ranks that exchange activations (tensor, context, pipeline) wait for each other inside such a phase: of these, all that
are held up are named.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

FACTOR = 1.5
"""Times the median: a rank that is that slow makes every step half as long again. Balanced ones differ by percents."""
WINDOW = 8
"""Steps that are added up, so that one moment of a busy machine names nobody."""
LEAST_STEPS = 3
LEAST_S = 0.01
"""Of the median, per step: what takes less is not worth a message."""


class ComputeTimer:
    """Seconds of this rank's forward and backward passes, until it is ready to exchange gradients. On a GPU they are
    the device's, and are read after something has waited for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin: Any = None
        self._end: Any = None

    def begin(self) -> None:
        self._begin, self._end = self._mark(), None

    def before_exchange(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """The function that exchanges gradients, which from now on ends the time."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._end = self._mark()
            return exchange(*args, **kwargs)

        return timed

    def seconds(self) -> float:
        """From the last `begin` on; 0 where no gradients were exchanged."""
        if self._begin is None or self._end is None:
            return 0.0
        if self._cuda:
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1e3
        return float(self._end - self._begin)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RankTimes:
    """Of this rank and all others; remembers `WINDOW` steps."""

    def __init__(self, phases: Sequence[str], device: torch.device) -> None:
        self._phases, self._device = tuple(phases), device
        self._seconds: deque[torch.Tensor] = deque(maxlen=WINDOW)

    def compare(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The figures up to this step. Args: `seconds`: of this rank, by phase. Called on every rank."""
        own = torch.tensor([seconds[phase] for phase in self._phases], dtype=torch.float64, device=self._device)
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, own)
        self._seconds.append(torch.stack(of_all).cpu())
        if len(self._seconds) < LEAST_STEPS:
            return {}
        means = torch.stack(list(self._seconds)).mean(dim=0)
        figures: dict[str, float] = {}
        for number, phase in enumerate(self._phases):
            figures |= straggler_figures(phase, means[:, number].tolist())
        return figures


def straggler_figures(phase: str, seconds: Sequence[float]) -> dict[str, float]:
    """`straggler/PHASE`: the slowest rank's seconds over the median; `straggler/rank_N_PHASE`, of each rank for which
    that is above `FACTOR`. Nothing for a single rank. Of an even number of ranks the lower median counts: of two, one
    is slow when it takes that much longer than the other."""
    usual = median_low(seconds)
    if len(seconds) < 2 or usual < LEAST_S:
        return {}
    slow = {f"straggler/rank_{rank}_{phase}": of / usual for rank, of in enumerate(seconds) if of > FACTOR * usual}
    return {f"straggler/{phase}": max(seconds) / usual, **slow}
