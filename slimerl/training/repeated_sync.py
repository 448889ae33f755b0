"""A weight sync that no engine took is done again where engines come back.

Flows in: a syncer; on the first rank what the rollout role knows of its engines. Flows out: the sync's seconds.
Invariant: all ranks try together, as often as the first one says; a sync is tried again only while an engine has been
announced or has registered anew, and raises its own error where none has.
"""

import time
from collections.abc import Callable
from typing import Protocol

from slimerl.engine.fleet import NoEngineLeft
from slimerl.resharding.shard_sync import SyncEnded
from slimerl.resharding.shard_transfer import TransferFailed
from slimerl.resilience import heartbeat
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import EngineState, Status
from slimerl.training.rollout_client import ServiceFailed

POLL_S = 0.2
ANNOUNCED_S = 5.0
"""For whoever watches the engines to see that one has ended and to say that it comes back."""
TRIES = 4


class Syncer(Protocol):
    def sync(self, version: int) -> dict[str, float]: ...
    def close(self) -> None: ...


class RepeatedSync:
    """
    Args of the constructor:
        status: asks the rollout role, on the first rank; None elsewhere.
        agree: gives the first rank's answer to every rank; a collective.
    """

    def __init__(self, syncer: Syncer, status: Callable[[], Status] | None, agree: Callable[[bool], bool]) -> None:
        self._syncer, self._status, self._agree = syncer, status, agree

    def sync(self, version: int) -> dict[str, float]:
        """Raises what the syncer raised last."""
        for _ in range(TRIES - 1):
            heartbeat.beat()
            failure: Exception | None = None
            seconds: dict[str, float] = {}
            try:
                seconds = self._syncer.sync(version)
            except (NoEngineLeft, TransferFailed, ServiceFailed, SyncEnded) as error:
                failure = error
            if not self._agree(failure is not None and self._engines_come()):
                if failure is not None:
                    raise failure
                return seconds
        heartbeat.beat()
        return self._syncer.sync(version)

    def close(self) -> None:
        self._syncer.close()

    def _engines_come(self) -> bool:
        if self._status is None:
            return False
        announced = Deadline("an engine to be announced", ANNOUNCED_S)
        while announced.remaining_s:
            try:
                status = self._status()
            except (ServiceFailed, DeadlineExceeded):
                return False  # the sync has failed already, and says of what
            if status.returning or any(one.state is EngineState.JOINING for one in status.engines):
                return True
            time.sleep(POLL_S)
        return False
