"""The sync transaction of `shards`: every trainer rank sends its own part, straight to the engine ranks that want it.

    staged:    transfer while engines generate → hold → pause → commit (copy, digest) → resume → release
    otherwise: hold → pause → transfer into live parameters → digest → resume → release

Flows in: each trainer rank's parameters, the engines that the rollout role names. Flows out: the same version in every
engine that is left, and the seconds of each phase. All trainer ranks call `sync` together; rank 0 alone coordinates.
Invariants: with staging nothing of a version touches live parameters before all of it has arrived and every parcel's
checksum is right, so that an engine is on the old version or on the new one; without, an engine that does not come to
the end is named as dirty. An engine serves a version only after the digests of its live parameters were those of what
was sent, on each of its ranks. Engines that are new, or whose receiver ended, are taken in while everything is held.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet
from slimerl.engine.inside.cuda_bucket import gpu_uuid
from slimerl.engine.inside.mailbox import Mailbox
from slimerl.resharding.proof import ProofError
from slimerl.resharding.shard_trainer import Parameters, ShardModel, TrainerMember
from slimerl.resharding.shard_transfer import Outcome, Sender, TransferFailed
from slimerl.resharding.sync import CALL_SHARE, TRANSFER_SHARE, WeightControl, WeightLease
from slimerl.resharding.transports.carrier import misfit
from slimerl.resharding.transports.shards import Message, Station
from slimerl.resilience.deadline import Deadline
from slimerl.samples.messages import EngineInfo, EngineState, Status
from slimerl.telemetry.phases import PhaseClock

FOLLOW_SHARE = 3.0
"""Of the lease: how long another rank waits for the coordinator's next order; a hold waits for requests to end."""

PROBE_S = 1.0
"""For an engine's server to say that it is there."""

Exchange = Callable[[Any], list[Any]]
"""Called by all trainer ranks together: every rank's value, in their order."""


class ShardControl(WeightControl, Protocol):
    """The rollout role's side."""

    def status(self) -> Status: ...


class SyncEnded(RuntimeError):
    """The coordinator has given up; its message says why."""


@dataclass(frozen=True)
class _Member:
    """What ranks tell each other once."""

    host: str
    gpu: str | None


class ShardSyncer:
    """Made once for a run on every trainer rank; all call `sync` together."""

    def __init__(
        self,
        model: ShardModel,
        rank: int,
        parameters: Parameters,
        control: ShardControl | None,
        exchange: Exchange,
        timeout_s: float,
        staged: bool,
    ) -> None:
        """
        Args:
            parameters: this rank's, named as in the plan.
            control: the rollout role's client, on rank 0 alone.
            timeout_s: seconds of the hold's lease.
            staged: into a buffer beside the weights, while engines generate; else straight into the weights.
        """
        self._model, self._rank, self._parameters = model, rank, parameters
        self._control, self._exchange = control, exchange
        self._timeout_s, self._staged = timeout_s, staged
        self._members: list[_Member] = []
        self._member: TrainerMember | None = None
        self._mailbox: Mailbox | None = None
        self._lead: _Lead | None = None

    def sync(self, version: int) -> dict[str, float]:
        """Bring `version` to the engines; returns the seconds of each phase, empty on ranks that do not coordinate.

        Raises:
            NoEngineLeft, TransferFailed: no engine holds the version; the message gives the reason for each.
            SyncEnded, CoordinatorGone: so it was, on the other ranks; or rank 0's process has ended.
            DeadlineExceeded: the transfer took so long that the lease might have run out.
        """
        if self._control is None:
            return self._follow()
        problem: str | None = f"the update to version {version} was not finished"
        if self._lead is None:
            self._members = self._exchange(self._introduction())
        try:
            seconds = self._coordinate(version, self._control)
            problem = None
            return seconds
        except Exception as error:
            problem = f"{problem}: {error}"
            if self._lead is None:
                self._exchange(problem)  # the others wait for an address
            raise
        finally:
            if self._lead is not None:
                self._lead.end_others(problem)

    def close(self) -> None:
        """The receivers in the engines end."""
        if self._member is not None:
            self._member.close()
        if self._lead is not None:
            self._lead.station.close()
        self._lead = self._member = self._mailbox = None

    # --- rank 0

    def _coordinate(self, version: int, control: ShardControl) -> dict[str, float]:
        clock = PhaseClock()
        outcome: Outcome | None = None
        with clock("plan"):
            ahead = self._lead.ready(control.status()) if self._lead is not None and self._staged else []
        if ahead:
            assert self._lead is not None
            outcome = self._lead.transfer_ahead(version, ahead, self._transfer_deadline(version), clock)
        with clock("hold"):
            lease = WeightLease(control, version, self._timeout_s, self._timeout_s * CALL_SHARE)
        # From here on the lease runs: pause and open take of the transfer's time.
        deadline = self._transfer_deadline(version)
        with lease.updating(clock):
            lead = self._leading(lease)
            begun = time.monotonic()
            lead.write(version, lease, outcome, deadline, clock)
            with clock("resume"):
                lease.serve()
            clock.seconds["stall"] = time.monotonic() - begun
        return dict(clock.seconds)

    def _transfer_deadline(self, version: int) -> Deadline:
        return Deadline(f"the transfer of version {version}", self._timeout_s * TRANSFER_SHARE)

    def _leading(self, lease: WeightLease) -> "_Lead":
        """The first time all ranks learn where the station is, once the engines' addresses are known."""
        if self._lead is not None:
            return self._lead
        members, here = self._members, self._members[0].host
        hosts = {f"trainer {rank}": one.host for rank, one in enumerate(members) if one.host != here}
        station = Station(self._timeout_s, {**lease.fleet.hosts, **hosts})
        member = self._join(station.address)
        gpus = [one.gpu for one in members]
        self._lead = _Lead(self._model, station, member, self._timeout_s * CALL_SHARE, self._staged, gpus)
        self._exchange(station.address)
        return self._lead

    # --- the others

    def _follow(self) -> dict[str, float]:
        if self._member is None:
            self._exchange(self._introduction())
            found: Message | str = self._exchange(None)[0]
            if isinstance(found, str):
                raise SyncEnded(found)
            self._join(found)
        assert self._member is not None
        assert self._mailbox is not None
        while True:
            deadline = Deadline("trainer rank 0 to go on with the sync", self._timeout_s * FOLLOW_SHARE)
            order = self._mailbox.next_order(deadline=deadline)
            if order["op"] == "end":
                if order["problem"] is not None:
                    raise SyncEnded(order["problem"])
                return {}
            self._member.answer_by_mail(order)

    def _introduction(self) -> _Member:
        device = next(iter(self._parameters().values())).device
        return _Member(socket.gethostname(), gpu_uuid(device) if device.type == "cuda" else None)

    def _join(self, address: Message) -> TrainerMember:
        self._mailbox = Mailbox(member=f"trainer/{self._rank}", **address)
        self._member = TrainerMember(self._model, self._rank, self._parameters, self._mailbox)
        return self._member


class _Lead:
    """Rank 0's, kept for the run."""

    def __init__(
        self,
        model: ShardModel,
        station: Station,
        own: TrainerMember,
        call_s: float,
        staged: bool,
        gpus: Sequence[str | None],
    ) -> None:
        self.station = station
        self._model, self._own, self._call_s, self._staged = model, own, call_s, staged
        self._gpus = list(gpus)
        self._sender: Sender | None = None
        self._backend = ""
        self._open: dict[str, str] = {}
        """By engine id, the admin key of the server in which a receiver waits: new with every start of a server."""
        self._planned_for = 0
        """Engines. For another number a new plan is checked against their parameters, which have the layout that is
        written to only while they are held."""

    def ready(self, status: Status) -> list[EngineInfo]:
        """The engines, where a receiver waits in each and the plan is for as many; else none."""
        living = [engine for engine in status.engines if engine.state is not EngineState.DEAD]
        waiting = [engine for engine in living if self._open.get(engine.engine_id) == engine.admin_key]
        return waiting if len(waiting) == len(living) == self._planned_for else []

    def transfer_ahead(
        self, version: int, engines: Sequence[EngineInfo], deadline: Deadline, clock: PhaseClock
    ) -> Outcome:
        """Into staging, while engines generate."""
        with EngineFleet(engines, self._call_s) as fleet:
            return self._transfer(version, engines, fleet, deadline, clock)

    def write(
        self, version: int, lease: WeightLease, outcome: Outcome | None, deadline: Deadline, clock: PhaseClock
    ) -> None:
        """Pause, transfer unless that has been done, write, prove, commit.

        Args:
            deadline: of the transfer, from the hold on.

        Raises: NoEngineLeft, TransferFailed, DeadlineExceeded.
        """
        fleet = lease.fleet
        for engine in lease.engines if outcome is not None else ():
            assert outcome is not None
            if engine.engine_id not in outcome.engines:
                reason = outcome.failures.get(
                    engine.engine_id, f"{engine.engine_id} joined while weights were under way"
                )
                fleet.set_aside(engine.engine_id, reason)
        with clock("pause"):
            fleet.pause()
            fleet.begin_weight_update()
        if outcome is None:
            with clock("open"):
                self._open_receivers(lease)
            left = [engine for engine in lease.engines if engine.engine_id in fleet.left]
            outcome = self._transfer(version, left, fleet, deadline, clock)
        with clock("apply"):
            self._apply(version, fleet, outcome, clock)
        with clock("commit"):
            fleet.end_weight_update(version)

    def _transfer(
        self,
        version: int,
        engines: Sequence[EngineInfo],
        fleet: EngineFleet,
        deadline: Deadline,
        clock: PhaseClock,
    ) -> Outcome:
        assert self._sender is not None
        with clock("plan"):
            self._model.plan(len(engines))
        with clock("transfer"):
            outcome = self._sender.send(version, engines, lambda engine_ids: _gone(fleet, engine_ids), deadline)
        self._planned_for = len(engines)
        for engine_id, reason in outcome.failures.items():
            fleet.set_aside(engine_id, reason)
            self._open.pop(engine_id, None)
        clock.seconds["receive"] = outcome.figures["slowest_s"]
        return outcome

    def _open_receivers(self, lease: WeightLease) -> None:
        fleet = lease.fleet
        size = len(self._model.engine_ranks)
        new = {e.engine_id: e for e in lease.engines if self._open.get(e.engine_id) != e.admin_key}
        for engine in lease.engines:
            if engine.tensor_parallel != size:
                fleet.set_aside(
                    engine.engine_id, f"{engine.engine_id} has {engine.tensor_parallel} ranks, the plan is for {size}"
                )
        for engine_id in new:
            self._open.pop(engine_id, None)
            self.station.reopen(engine_id)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._model.tensors.items()}
        reports = self._ask(
            fleet,
            lambda name: {"op": "open_shards" if name in new else "describe", "receiver": self.station.receiver(name)},
        )
        for engine_id, ranks in reports.items():
            for rank, (report, placed) in enumerate(zip(ranks, self._model.engine_ranks, strict=True)):
                if problem := misfit(report["parameters"], placed, dtypes):
                    hint = "; where the engine changes its layout after loading, set sync.transport: broadcast"
                    fleet.set_aside(engine_id, f"{engine_id} rank {rank}: {problem}{hint}")
        fleet.check_some_left()
        self._open |= {engine_id: new[engine_id].admin_key for engine_id in new.keys() & set(fleet.left)}
        backend = self._choose_backend([report["gpu"] for ranks in reports.values() for report in ranks])
        if self._sender is None or backend != self._backend:
            self._backend = backend
            self._sender = Sender(self._model, self.station, self._own, self._call_s, self._staged, backend)

    def _choose_backend(self, engine_gpus: Sequence[str | None]) -> str:
        """NCCL refuses two members on one GPU, and members without."""
        gpus = [*self._gpus, *engine_gpus]
        return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"

    def _apply(self, version: int, fleet: EngineFleet, outcome: Outcome, clock: PhaseClock) -> None:
        message = {"op": "commit_shards", "transfer": outcome.transfer, "version": version}
        reports = self._ask(fleet, lambda _name: message)
        for engine_id, ranks in reports.items():
            try:
                outcome.proof.check(engine_id, [report["digests"] for report in ranks])
            except ProofError as error:
                fleet.set_aside(engine_id, str(error))
        for phase in ("copy", "digest"):
            clock.seconds[phase] = max(report[f"{phase}_s"] for ranks in reports.values() for report in ranks)
        fleet.check_some_left()

    def _ask(self, fleet: EngineFleet, message: Callable[[str], Message]) -> dict[str, list[Message]]:
        async def ask(client: EngineClient) -> list[Message]:
            order = {**self.station.address, **message(client.engine_id)}
            ranks = fleet.tensor_parallel[client.engine_id]
            return await self.station.desk.ask(client, [order] * ranks, timeout_s=self._call_s)

        return fleet.each(ask)

    def end_others(self, problem: str | None) -> None:
        for rank in range(1, len(self._gpus)):
            self.station.order(f"trainer/{rank}", {"op": "end", "problem": problem})


def _gone(fleet: EngineFleet, engine_ids: Sequence[str]) -> dict[str, str]:
    """Of these engines, those whose server does not answer any more."""

    async def healthy(client: EngineClient) -> bool:
        return client.engine_id not in engine_ids or await client.healthy(timeout_s=PROBE_S)

    return {
        engine_id: f"{engine_id}: its server does not answer; has it ended? Its log says why"
        for engine_id, answers in fleet.each(healthy).items()
        if not answers
    }


__all__ = ["ShardControl", "ShardSyncer", "SyncEnded", "TransferFailed"]
