"""The sync transaction: after each optimizer step, the engines get the trainer's weights, proven, as one version.

    hold → pause → check → (gather → quantise, if FP8 → send, digest) per bucket → verify → commit → release

Flows in: the trainer's parameters on the ranks that gather, the engines that the rollout role names. Flows out: the
same version in every engine that is left, and the seconds of each phase.
Invariants: the first gathering rank alone coordinates; an engine serves a version only after the digests of its live
parameters were equal to those of what was sent, on each of its ranks; whatever happens, the hold is released with
every other engine named as dirty.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from slimerl.engine.fleet import EngineFleet
from slimerl.resharding.gather import Gather
from slimerl.resharding.proof import WeightProof
from slimerl.resharding.quantise import on_the_wire
from slimerl.resharding.sent_state import SentState
from slimerl.resharding.sync_plan import SyncPlan
from slimerl.resharding.transports.broadcast import BroadcastCarrier
from slimerl.resharding.transports.carrier import Carrier
from slimerl.resharding.transports.delta import DeltaCarrier
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


class WeightLease:
    """The engines, held for one version. `end` it, whatever happens."""

    def __init__(self, control: WeightControl, version: int, lease_s: float, call_s: float) -> None:
        """Raises what `control` raises where the hold is not granted.

        Args:
            lease_s: seconds after which the hold ends by itself.
            call_s: bound of every call to an engine.
        """
        self.version = version
        self._control = control
        hold = control.hold(HoldRequest(version, lease_s))
        self._lease_id = hold.lease_id
        self.engines = hold.engines
        try:
            self.fleet = EngineFleet(hold.engines, call_s, hold.pause)
        except Exception as error:
            # Nobody else knows of the hold. Nothing was asked of the engines, but none has the version.
            reason = f"the engines could not be called: {type(error).__name__}: {error}"
            dirty = {one.engine_id: reason for one in hold.engines}
            control.release(ReleaseRequest(hold.lease_id, version, [], dirty))
            raise

    def serve(self) -> None:
        """After the commit: the engines left go on, with the new weights alone. Raises NoEngineLeft."""
        self.fleet.flush_cache()
        self.fleet.continue_generation()

    @contextmanager
    def updating(self, clock: PhaseClock) -> Iterator[None]:
        """The whole update is inside; the hold is released however it ends, with no whole engine where it raised."""
        problem: str | None = f"the update to version {self.version} was not finished"
        try:
            yield
            problem = None
        except Exception as error:
            problem = f"{problem}: {error}"
            raise
        finally:
            with clock("release"):
                self.end(problem)

    def end(self, problem: str | None = None) -> None:
        """Release the hold.

        Args:
            problem: why no engine is proven to hold the version; None: those that are left do.
        """
        failures, whole = self.fleet.failures, self.fleet.left if problem is None else []
        unproven = problem or "it was not updated"
        names = [one.engine_id for one in self.engines]
        dirty = {name: failures.get(name, unproven) for name in names if name not in whole}
        try:
            self.fleet.close()
        finally:
            self._control.release(ReleaseRequest(self._lease_id, self.version, whole, dirty))


class WeightSyncer:
    """Made once for a run on every trainer rank; all gathering ranks call `sync` together, or, where the hold lasts
    longer than the transfer (`training/colocated.py`), `write` inside a lease of their own.

    Args of the constructor:
        group: the gathering ranks in the plan's order; None for a single one.
        parameters: this rank's parameters, named as in the plan; None on ranks that do not gather.
        control: the rollout role's client, on the first gathering rank alone.
        timeout_s: seconds of the hold's lease; the whole sync ends before.
        transport: `ipc`, `broadcast`, `disk` or `delta`.
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
        self._sent = SentState()
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
        if self._control is None:
            self.write(None, PhaseClock())
            return {}
        with self._gathering() as buckets:
            return self._coordinate(version, buckets)

    def close(self) -> None:
        """Nothing stays open from one sync to the next."""

    def hold(self, version: int, lease_s: float) -> WeightLease:
        """On the first gathering rank: a lease for `write`. Raises as `WeightLease`."""
        if self._control is None:
            raise ValueError("only the rank with the rollout role's client can hold the engines")
        return WeightLease(self._control, version, lease_s, self._timeout_s * CALL_SHARE)

    def write(self, lease: WeightLease | None, clock: PhaseClock) -> None:
        """Transfer, proof and commit, all gathering ranks together; the engines stay paused (`WeightLease.serve`).

        Args:
            lease: on the first gathering rank; None on the others, which pass their part on.

        Raises: as `sync`.
        """
        with self._gathering() as buckets:
            if lease is not None:
                self._write(lease.version, lease.fleet, buckets, clock)
                return
            with trace.span("gather"):
                for _ in buckets:
                    pass

    @contextmanager
    def _gathering(self) -> Iterator[Iterator[list[tuple[str, torch.Tensor]]]]:
        """The buckets, which are read to the end also where something fails: the other ranks are in the middle of
        them. No bucket on ranks that do not gather."""
        if self._gather is None or self._parameters is None:
            yield iter(())
            return
        buckets = self._gather.run(self._parameters())
        try:
            yield buckets
        except Exception:
            for _ in buckets:
                pass
            raise

    def _coordinate(self, version: int, buckets: Iterator[list[tuple[str, torch.Tensor]]]) -> dict[str, float]:
        clock = PhaseClock()
        with clock("hold"):
            lease = self.hold(version, self._timeout_s)
        with lease.updating(clock):
            self._write(version, lease.fleet, buckets, clock)
            with clock("commit"):
                lease.serve()
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
        with self._open_carrier(fleet, transfer) as carrier:
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

    def _open_carrier(self, fleet: EngineFleet, transfer: Deadline) -> Carrier:
        call_s = self._timeout_s * CALL_SHARE
        match self._transport:
            case "ipc":
                return IpcCarrier(fleet, self._plan.largest_bucket_bytes, call_s)
            case "broadcast":
                return BroadcastCarrier(fleet, call_s)
            case "disk":
                return DiskCarrier(fleet, self._directory / "sync", call_s)
            case "delta":
                return DeltaCarrier(fleet, self._sent, self._plan.engine_ranks, call_s, transfer)
        raise ValueError(f"unknown transport {self._transport!r}")


def _next(
    buckets: Iterator[list[tuple[str, torch.Tensor]]], clock: PhaseClock
) -> list[tuple[str, torch.Tensor]] | None:
    with clock("gather"):
        return next(buckets, None)
