"""Where the trainer finds the rollout role that was started in the place of one that ended.

Flows in: the run directory, the role that is gone. Flows out: the address of the next one.
Invariant: a role that still answers has no successor, whatever became of the call to it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slimerl.resilience import heartbeat
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import ServiceAddress, read_address

POLL_S = 0.2


@dataclass(frozen=True)
class Successors:
    """`within_s`: for one to be started and to answer; `process`: its number, where there are several."""

    run_dir: Path
    within_s: float
    process: int = 0

    def of(
        self, gone: ServiceAddress, answers: Callable[[], bool], deadline: Deadline, why: str
    ) -> ServiceAddress | None:
        """Wait for it. None: there is none, for the role is not gone.

        Args:
            answers: does the role itself answer after all?
            why: it is taken to be gone.

        Raises:
            DeadlineExceeded: nothing was announced.
        """
        while True:
            announced = self._announced()
            if announced is not None and announced.token != gone.token:
                heartbeat.beat()  # what waits for its answer begins anew
                return announced
            if announced is not None and answers():
                return None
            deadline.check(why)
            time.sleep(min(POLL_S, deadline.remaining_s))

    def _announced(self) -> ServiceAddress | None:
        try:
            return read_address(self.run_dir, self.process)
        except OSError:
            return None  # the last one has ended
