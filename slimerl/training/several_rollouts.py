"""The trainer's side of several rollout processes: weights go to the engines of all, batches come from the first.

Flows in: calls as of `RolloutClient`. Flows out: one answer for all processes.
Invariant: engines are held everywhere or nowhere, and the first process, which hands out work for a new version, hears
of it last. A process that is started in the place of one that ended is found by itself, whichever it is.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import (
    EngineInfo,
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    SamplePayload,
    ServiceAddress,
    Status,
)
from slimerl.training.rollout_client import RolloutClient
from slimerl.training.successor import Successors

Answer = TypeVar("Answer")


class SeveralRollouts(RolloutClient):
    """Of the first process, and of the others what is theirs."""

    def __init__(
        self,
        address: ServiceAddress,
        request_s: float,
        others: Sequence[RolloutClient],
        successors: Successors | None = None,
    ) -> None:
        """Args: `others`: clients of the processes behind the first, in order; the rest as of `RolloutClient`."""
        super().__init__(address, request_s, successors)
        self._others = list(others)
        self._holds: dict[int, HoldReply] = {}

    @staticmethod
    def connect_all(
        run_dir: Path, deadline: Deadline, request_s: float, processes: int, successor_s: float = 0.0
    ) -> "SeveralRollouts":
        """Wait until every rollout process has announced itself and answers. Raises DeadlineExceeded."""
        first, *others = (
            RolloutClient.connect(run_dir, deadline, request_s, successor_s, process) for process in range(processes)
        )
        return SeveralRollouts(first.address, request_s, others, first.successors)

    def status(self) -> Status:
        """Of the whole run."""
        found = self._all(RolloutClient.status)
        engines = [engine for status in found for engine in status.engines]
        returning = [name for status in found for name in status.returning]
        return msgspec.structs.replace(found[0], engines=engines, returning=returning)

    def fetch(self, sample_ids: Sequence[str], shards: Sequence[int] = ()) -> list[SamplePayload]:
        """Payloads in the order of the ids; the processes that hold them are asked at the same time."""
        of_shard: dict[int, list[str]] = {}
        for sample_id, shard in zip(sample_ids, shards, strict=True):
            of_shard.setdefault(shard, []).append(sample_id)
        with ThreadPoolExecutor(self._processes) as threads:
            asked = [threads.submit(RolloutClient.fetch, self._of(shard), wanted) for shard, wanted in of_shard.items()]
        found = {payload.sample_id: payload for each in asked for payload in each.result()}
        return [found[sample_id] for sample_id in sample_ids]

    def hold(self, request: HoldRequest) -> HoldReply:
        """Of all engines. Raises as `RolloutClient.hold`; then none is held."""
        with ThreadPoolExecutor(self._processes) as threads:
            asked = [
                threads.submit(RolloutClient.hold, self._of(process), request) for process in range(self._processes)
            ]
        failed = [each.exception() for each in asked if each.exception() is not None]
        self._holds = {process: each.result() for process, each in enumerate(asked) if each.exception() is None}
        if failed and failed[0] is not None:
            why = f"the engines of another rollout process could not be held: {failed[0]}"
            self._release(request.version, [], dict.fromkeys(self._engines(), why))
            raise failed[0]
        replies = list(self._holds.values())
        engines: list[EngineInfo] = [engine for reply in replies for engine in reply.engines]
        return HoldReply(",".join(reply.lease_id for reply in replies), engines, replies[0].pause)

    def release(self, request: ReleaseRequest) -> None:
        """Everywhere; the first failure is raised once all were told."""
        self._release(request.version, request.whole, request.dirty)

    def _release(self, version: int, whole: Sequence[str], dirty: dict[str, str]) -> None:
        holds, self._holds = self._holds, {}
        failures: list[Exception] = []
        for process in sorted(holds, reverse=True):
            own = {engine.engine_id for engine in holds[process].engines}
            part = ReleaseRequest(
                *(holds[process].lease_id, version, [name for name in whole if name in own]),
                {name: why for name, why in dirty.items() if name in own},
            )
            try:
                RolloutClient.release(self._of(process), part)
            except Exception as error:  # noqa: BLE001 - raised below, when the others have been told
                failures.append(error)
        if failures:
            raise failures[0]

    @property
    def _processes(self) -> int:
        return 1 + len(self._others)

    def _of(self, process: int) -> RolloutClient:
        """To be asked by the methods of `RolloutClient`: those of this one ask all."""
        return self._others[process - 1] if process else self

    def _engines(self) -> list[str]:
        return [engine.engine_id for reply in self._holds.values() for engine in reply.engines]

    def _all(self, ask: Callable[[RolloutClient], Answer]) -> list[Answer]:
        with ThreadPoolExecutor(self._processes) as threads:
            return list(threads.map(lambda process: ask(self._of(process)), range(self._processes)))
