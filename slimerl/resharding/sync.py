"""The sync transaction: after each optimizer step, the engines get the trainer's weights, proven, as one version.

    hold → pause → check → (gather → send, digest) per bucket → verify → commit → release

Flows in: the trainer's parameters on the ranks that gather, the engines that the rollout role names. Flows out: the
same version in every engine that is left, and the seconds of each phase.
Invariants: the first gathering rank alone coordinates; an engine serves a version only after the digests of its live
parameters were equal to those of what was sent, on each of its ranks; whatever happens, the hold is released with
every other engine named as dirty.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from slimerl.engine.fleet import EngineFleet
from slimerl.resharding.gather import Gather
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.sync_plan import SyncPlan
from slimerl.resharding.transports.ipc import IpcCarrier
from slimerl.samples.messages import HoldReply, HoldRequest, ReleaseRequest

CARRIERS = {"ipc": IpcCarrier}
"""By the name of the transport in the spec."""

Parameters = Callable[[], Mapping[str, torch.Tensor]]


class WeightControl(Protocol):
    """The rollout role's side of a sync."""

    def hold(self, request: HoldRequest) -> HoldReply: ...
    def release(self, request: ReleaseRequest) -> None: ...


class PhaseClock:
    """Seconds spent by name of phase; a phase entered many times adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - start


class WeightSyncer:
    """Made once for a run on every trainer rank; all gathering ranks call `sync` together.

    Args of the constructor:
        group: the gathering ranks in the plan's order; None for a single one.
        parameters: this rank's parameters, named as in the plan; None on ranks that do not gather.
        control: the rollout role's client, on the first gathering rank alone.
        timeout_s: bound of the hold's lease and of each call to an engine.
    """

    def __init__(
        self,
        plan: SyncPlan,
        group: dist.ProcessGroup | None,
        parameters: Parameters | None,
        control: WeightControl | None,
        timeout_s: float,
        transport: str = "ipc",
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._control = control
        self._timeout_s = timeout_s
        self._carrier = CARRIERS[transport]
        self._gather = Gather(plan.trainer_ranks, plan.buckets, group) if parameters is not None else None

    def sync(self, version: int) -> dict[str, float]:
        """Bring `version` to the engines; returns the seconds of each phase, empty on ranks that do not coordinate.

        Raises:
            NoEngineLeft: no engine holds the version; the message gives the reason for each.
            CoverageError, ProofError, NothingSent: plan and parameters do not fit.
        """
        if self._gather is None or self._parameters is None:
            return {}
        if self._control is None:
            for _ in self._gather.run(self._parameters()):
                pass
            return {}
        return self._coordinate(version, self._control, self._gather.run(self._parameters()))

    def _coordinate(
        self, version: int, control: WeightControl, buckets: Iterator[list[tuple[str, torch.Tensor]]]
    ) -> dict[str, float]:
        clock = PhaseClock()
        with clock("hold"):
            hold = control.hold(HoldRequest(version, self._timeout_s))
        whole: list[str] = []
        failures: dict[str, str] = {}
        try:
            with EngineFleet(hold.engines, self._timeout_s) as fleet:
                failures = fleet.failures
                self._write(version, fleet, buckets, clock)
                whole = fleet.left
        finally:
            unproven = f"the update to version {version} was not finished"
            dirty = {
                one.engine_id: failures.get(one.engine_id, unproven)
                for one in hold.engines
                if one.engine_id not in whole
            }
            with clock("release"):
                control.release(ReleaseRequest(hold.lease_id, version, whole, dirty))
        return dict(clock.seconds)

    def _write(
        self,
        version: int,
        fleet: EngineFleet,
        buckets: Iterator[list[tuple[str, torch.Tensor]]],
        clock: PhaseClock,
    ) -> None:
        proof = WeightProof(self._plan.tensors, self._plan.engine_ranks)
        with self._carrier(fleet, self._plan.largest_bucket_bytes, self._timeout_s) as carrier:
            with clock("pause"):
                fleet.pause()
                fleet.begin_weight_update()
                carrier.check(self._plan.tensors, self._plan.engine_ranks)
            while (bucket := _next(buckets, clock)) is not None:
                with clock("send"):
                    carrier.send(bucket)
                # The engines load the bucket meanwhile.
                with clock("digest"):
                    for name, tensor in bucket:
                        proof.add(name, tensor)
            with clock("verify"):
                carrier.prove(version, self._plan.engine_ranks, proof)
        with clock("commit"):
            fleet.end_weight_update(version)
            fleet.flush_cache()
            fleet.continue_generation()


def _next(
    buckets: Iterator[list[tuple[str, torch.Tensor]]], clock: PhaseClock
) -> list[tuple[str, torch.Tensor]] | None:
    with clock("gather"):
        return next(buckets, None)
