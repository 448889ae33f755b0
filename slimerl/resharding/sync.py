"""The sync transaction: after each optimizer step, the engines get the trainer's weights, proven, as one version.

    hold → pause → check → (gather → quantise, if FP8 → send, digest) per bucket → verify → commit → release

Flows in: the trainer's parameters on the ranks that gather, the engines that the rollout role names. Flows out: the
same version in every engine that is left, and the seconds of each phase.
Invariants: the first gathering rank alone coordinates; an engine serves a version only after the digests of its live
parameters were equal to those of what was sent, on each of its ranks; whatever happens, the hold is released with
every other engine named as dirty.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from slimerl.engine.fleet import EngineFleet
from slimerl.resharding.gather import Gather
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.quantise import on_the_wire
from slimerl.resharding.sync_plan import SyncPlan
from slimerl.resharding.transports.broadcast import BroadcastCarrier
from slimerl.resharding.transports.carrier import Carrier
from slimerl.resharding.transports.disk import DiskCarrier
from slimerl.resharding.transports.ipc import IpcCarrier
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import HoldReply, HoldRequest, ReleaseRequest
from slimerl.telemetry import trace
from slimerl.telemetry.phases import PhaseClock

CALL_SHARE, TRANSFER_SHARE = 1 / 6, 1 / 2
"""Of the lease: an engine's bound for one call, and until when the last bucket must be on its way. At most three calls
follow, so that an engine that hangs does not keep the others past the lease."""

Parameters = Callable[[], Mapping[str, torch.Tensor]]


class WeightControl(Protocol):
    """The rollout role's side of a sync."""

    def hold(self, request: HoldRequest) -> HoldReply: ...
    def release(self, request: ReleaseRequest) -> None: ...


class WeightSyncer:
    """Made once for a run on every trainer rank; all gathering ranks call `sync` together.

    Args of the constructor:
        group: the gathering ranks in the plan's order; None for a single one.
        parameters: this rank's parameters, named as in the plan; None on ranks that do not gather.
        control: the rollout role's client, on the first gathering rank alone.
        timeout_s: seconds of the hold's lease; the whole sync ends before.
        transport: `ipc`, `broadcast` or `disk`.
        directory: of the run; `disk` puts its buckets there.
    """

    def __init__(
        self,
        plan: SyncPlan,
        group: dist.ProcessGroup | None,
        parameters: Parameters | None,
        control: WeightControl | None,
        timeout_s: float,
        transport: str,
        directory: Path,
    ) -> None:
        self._plan = plan
        self._parameters = parameters
        self._control = control
        self._timeout_s = timeout_s
        self._transport = transport
        self._directory = directory
        self._gather = (
            Gather(plan.trainer_ranks, plan.gathered, group, plan.kept_back) if parameters is not None else None
        )

    def sync(self, version: int) -> dict[str, float]:
        """Bring `version` to the engines; returns the seconds of each phase, empty on ranks that do not coordinate.

        Raises:
            NoEngineLeft: no engine holds the version; the message gives the reason for each.
            CoverageError, ProofError, NothingSent: plan and parameters do not fit.
            BucketNotWritten: `disk` has no room.
            DeadlineExceeded: the transfer took so long that the lease might have run out.
        """
        if self._gather is None or self._parameters is None:
            return {}
        if self._control is None:
            with trace.span("gather"):
                for _ in self._gather.run(self._parameters()):
                    pass
            return {}
        buckets = self._gather.run(self._parameters())
        try:
            return self._coordinate(version, self._control, buckets)
        except Exception:
            for _ in buckets:  # the other ranks are in the middle of it
                pass
            raise

    def _coordinate(
        self, version: int, control: WeightControl, buckets: Iterator[list[tuple[str, torch.Tensor]]]
    ) -> dict[str, float]:
        clock = PhaseClock()
        with clock("hold"):
            hold = control.hold(HoldRequest(version, self._timeout_s))
        whole: list[str] = []
        failures: dict[str, str] = {}
        unproven = f"the update to version {version} was not finished"
        try:
            with EngineFleet(hold.engines, self._timeout_s * CALL_SHARE) as fleet:
                failures = fleet.failures
                self._write(version, fleet, buckets, clock)
                whole = fleet.left
        except Exception as error:
            unproven += f": {error}"
            raise
        finally:
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
        transfer = Deadline(f"the transfer of version {version}", self._timeout_s * TRANSFER_SHARE)
        proof = WeightProof(self._plan.tensors, self._plan.engine_ranks)
        with self._open_carrier(fleet) as carrier:
            with clock("pause"):
                fleet.pause()
                fleet.begin_weight_update()
                carrier.check(self._plan.tensors, self._plan.engine_ranks)
            while (bucket := _next(buckets, clock)) is not None:
                transfer.check("raise deadlines.sync_s")
                if self._plan.scales is not None:
                    with clock("quantise"):
                        bucket = list(on_the_wire(bucket, self._plan.by_name, self._plan.scales))
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

    def _open_carrier(self, fleet: EngineFleet) -> Carrier:
        call_s = self._timeout_s * CALL_SHARE
        match self._transport:
            case "ipc":
                return IpcCarrier(fleet, self._plan.largest_bucket_bytes, call_s)
            case "broadcast":
                return BroadcastCarrier(fleet, call_s)
            case "disk":
                return DiskCarrier(fleet, self._directory / "sync", call_s)
        raise ValueError(f"unknown transport {self._transport!r}")


def _next(
    buckets: Iterator[list[tuple[str, torch.Tensor]]], clock: PhaseClock
) -> list[tuple[str, torch.Tensor]] | None:
    with clock("gather"):
        return next(buckets, None)
