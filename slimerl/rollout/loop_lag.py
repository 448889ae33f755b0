"""How late the event loop is: work that keeps it busy delays every request of the role.

Flows out: the worst delay since it was last asked for, and a warning in the log beyond `ALARM_S`.
"""

import asyncio
import logging
import time

logger = logging.getLogger(__name__)

PERIOD_S = 0.05
ALARM_S = 0.5
"""Longer than any scheduling of a busy machine; shorter than what a user would call a stall."""


class LoopLag:
    def __init__(self) -> None:
        self._worst_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            late = time.monotonic() - due
            self._worst_s = max(self._worst_s, late)
            if late > ALARM_S:
                logger.warning("the event loop was kept busy for %.2f s; work of that length belongs off it", late)

    def take_worst_s(self) -> float:
        """Worst delay in seconds since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst
