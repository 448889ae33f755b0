"""One transfer of a version to all engines, made by the coordinator: plan, orders, attempts until it has come whole.

Flows in: engines whose receivers are open, this rank's own part. Flows out: which engines have all of their parcels,
each proven by its checksum, and the digests that their parameters must have after the commit.
Invariants: an engine that dies, stands still or does not fit is set aside by name, and the others are sent the version
by a plan without it, over new links; a parcel with wrong bytes is named with the hop at which it broke.

How a culprit is told from its victims: a broken link closes all links of who sees it, so that victims report at once.
Who is dead or stands still reports nothing; where all report, `shard_blame.py` finds at which hop they waited in vain.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slimerl.engine.inside.mailbox import packed
from slimerl.resharding.planner import Plan, without
from slimerl.resharding.shard_blame import blamed
from slimerl.resharding.shard_orders import Transfers, engine_message, member_of, steps_of, text, transfers_of
from slimerl.resharding.shard_proof import ShardProof
from slimerl.resharding.shard_trainer import ShardModel, TrainerMember, read_checksums, read_digests
from slimerl.resharding.transports.shards import Gone, Message, Station
from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.samples.messages import EngineInfo

UNEXPLAINED_BREAKS = 1
"""How often a transfer may break without a member to blame (a reset connection, a flipped bit)."""
OPEN_SHARE = 1 / 2
"""Of the time to carry: how long a member waits for the other end of a new link."""
CARRY_SHARE = 4 / 5
"""Of an attempt's time: how long members carry parcels. In the rest they report that it has passed."""
SHORTEST_ATTEMPT = 1 / 2
"""Of an attempt's time: as much has to be left for one more."""


class TransferFailed(RuntimeError):
    """No engine can get the version: a trainer rank failed, or no engine is left."""


@dataclass(frozen=True)
class Outcome:
    """Of a transfer."""

    transfer: str
    engines: list[str]
    """Ids of those that have all of it."""
    failures: dict[str, str]
    proof: ShardProof
    figures: dict[str, float]


@dataclass
class _Round:
    """One plan of one set of engines, with the links that serve it."""

    plan: Plan
    """Without the dead."""
    links: str
    transfers: Transfers
    told: set[str] = field(default_factory=set)
    """Members that have its steps."""


class Sender:
    """Kept for a run: what members know need not be said again."""

    def __init__(
        self, model: ShardModel, station: Station, own: TrainerMember, attempt_s: float, staged: bool, backend: str
    ) -> None:
        """`attempt_s`: bound of one attempt, reports included."""
        self._model, self._station, self._own = model, station, own
        self._attempt_s, self._staged, self._backend = attempt_s, staged, backend
        self._contents: dict[str, str] = {}
        """By member, the key of the contents that it has."""
        self._made: dict[tuple[str, int], bytes] = {}
        """Contents of the last plan, by key and rank: those of most replicas are the same."""
        self._round: _Round | None = None
        self._round_of: tuple[str, tuple[str, ...]] = "", ()

    def send(self, version: int, engines: Sequence[EngineInfo], gone: Gone, deadline: Deadline) -> Outcome:
        """Bring `version` into all of these engines.

        Args:
            gone: which of these engines will never answer, and why.
            deadline: no attempt is begun that could end later.

        Raises:
            TransferFailed: it did not come to any.
            DeadlineExceeded: it would not have ended in time.
        """
        engines = sorted(engines, key=lambda engine: engine.engine_id)
        plan = self._model.plan(len(engines))
        failures = self._tell_plan(plan, engines, gone, self._time(deadline, "the plan was not told"))
        unexplained, last = 0, "no attempt was made"
        while True:
            left = [engine for engine in engines if engine.engine_id not in failures]
            if not left:
                raise TransferFailed("no engine is left: " + "; ".join(failures.values()))
            seconds = self._time(deadline, last)
            transfer = f"{version}-{secrets.token_hex(4)}"
            try:
                attempt = self._attempt(transfer, plan, engines, failures, gone, seconds)
            except BaseException:
                self._round = None  # its links may be closed
                raise
            failures |= attempt.lost
            if attempt.whole:
                proof = ShardProof(self._model.holders, len(self._model.engine_ranks))
                for report in attempt.trainers:
                    proof.add(read_digests(report["digests"], self._model.names))
                names = [engine.engine_id for engine in left]
                return Outcome(transfer, names, failures, proof, attempt.figures)
            self._round = None
            last = attempt.seen
            if attempt.blamed and len(left) > 1:
                failures |= attempt.blamed
            elif not attempt.lost:
                unexplained += 1
                failures |= _culprits(attempt, unexplained)

    def _time(self, deadline: Deadline, last: str) -> float:
        """For one attempt. Raises DeadlineExceeded where what is left is too little; `last`: what was last seen."""
        seconds = min(self._attempt_s, deadline.remaining_s)
        if seconds < SHORTEST_ATTEMPT * self._attempt_s:
            left = f"{seconds:.3g} of {deadline.seconds:g} s are left of {deadline.what}"
            raise DeadlineExceeded(f"{left}, too few for another attempt; raise deadlines.sync_s ({last})")
        return seconds

    def _tell_plan(self, plan: Plan, engines: Sequence[EngineInfo], gone: Gone, seconds: float) -> dict[str, str]:
        """Contents to those who do not have them; returns engines that they do not fit."""
        trainers = [f"trainer/{rank}" for rank in range(1, plan.topology.trainer_ranks)]
        new = [member for member in trainers if self._contents.get(member) != plan.digest]
        for member in new:
            self._station.order(member, {"op": "plan", "engines": len(engines), "plan": plan.digest})
        own = self._own.answer({"op": "plan", "engines": len(engines), "plan": plan.digest})
        told: dict[str, tuple[str, str]] = {}
        for replica, engine in enumerate(engines):
            for rank, member in enumerate(self._members_of(engine)):
                # What a rank takes depends on its engine's place on a node that several share.
                key = f"{plan.digest}/{replica % plan.topology.copies_per_node}"
                if self._contents.get(member) != key:
                    self._station.order(member, self._contents_order(plan, key, replica, rank))
                    told[member] = key, engine.engine_id
        waiting = Deadline("members to take their contents", seconds)
        engine_of = {member: engine_id for member, (_, engine_id) in told.items()}
        reports = self._station.collect([*new, *told], waiting, _never(engine_of, gone))
        _check_trainers({"trainer/0": own, **{member: reports.get(member) for member in new}})
        failures: dict[str, str] = {}
        for member, (_, engine_id) in told.items():
            if problem := _problem(reports.get(member), waiting.seconds):
                failures.setdefault(engine_id, f"{engine_id} ({member}): {problem}")
        wanted = {member: key for member, (key, _) in told.items()} | dict.fromkeys(new, plan.digest)
        self._contents |= {member: wanted[member] for member in wanted if _problem(reports.get(member), 0) is None}
        if told:
            self._round = None
        return failures

    def _contents_order(self, plan: Plan, key: str, replica: int, rank: int) -> bytes:
        if (key, rank) not in self._made:
            self._made = {made: order for made, order in self._made.items() if made[0].startswith(plan.digest)}
            model = self._model
            message = engine_message(plan, replica, rank, model.engine_ranks[rank], model.tensors, model.granules)
            self._made[key, rank] = packed(
                {"op": "contents", "staged": self._staged, "backend": self._backend, **message}
            )
        return self._made[key, rank]

    def _attempt(
        self,
        transfer: str,
        plan: Plan,
        engines: Sequence[EngineInfo],
        failures: Mapping[str, str],
        gone: Gone,
        seconds: float,
    ) -> "_Attempt":
        dead = [replica for replica, engine in enumerate(engines) if engine.engine_id in failures]
        current = self._current_round(plan, engines, dead)
        members = {f"trainer/{rank}": rank for rank in range(plan.topology.trainer_ranks)}
        engine_of: dict[str, str] = {}
        for replica, engine in enumerate(engines):
            if replica in dead:
                continue
            for rank, member in enumerate(self._members_of(engine)):
                members[member] = member_of(plan, replica, rank)
                engine_of[member] = engine.engine_id
        carry_s = seconds * CARRY_SHARE
        orders = {name: self._transfer_order(transfer, current, name, n, carry_s) for name, n in members.items()}
        waiting = Deadline(f"reports on transfer {transfer}", seconds)
        for member, order in orders.items():
            if member != self._own.name:
                self._station.order(member, order)
        own = self._own.answer(orders[self._own.name])
        others = [member for member in members if member != self._own.name]
        reports = {self._own.name: own, **self._station.collect(others, waiting, _never(engine_of, gone))}
        return _judge(current, members, engine_of, reports, waiting.seconds)

    def _current_round(self, plan: Plan, engines: Sequence[EngineInfo], dead: Sequence[int]) -> _Round:
        key = plan.digest, tuple(self._station.receiver(e.engine_id) for r, e in enumerate(engines) if r not in dead)
        if self._round is None or self._round_of != key:
            left = without(plan, dead) if dead else plan
            self._round = _Round(left, f"links-{secrets.token_hex(8)}", transfers_of(left))
            self._round_of = key
        return self._round

    def _transfer_order(self, transfer: str, current: _Round, member: str, number: int, seconds: float) -> Message:
        order: Message = {
            "op": "transfer",
            "transfer": transfer,
            "links": current.links,
            "member": number,
            "backend": self._backend,
            "timeout_s": seconds,
            "open_s": seconds * OPEN_SHARE,
        }
        if member not in current.told:
            order["steps"] = text(steps_of(current.transfers, number))
            current.told.add(member)
        return order

    def _members_of(self, engine: EngineInfo) -> list[str]:
        return [f"{self._station.receiver(engine.engine_id)}/{rank}" for rank in range(engine.tensor_parallel)]


def _never(engine_of: Mapping[str, str], gone: Gone) -> Gone:
    """Of members instead of engines."""

    def members(silent: Sequence[str]) -> dict[str, str]:
        reasons = gone(sorted({engine_of[member] for member in silent if member in engine_of}))
        return {member: reasons[engine_of[member]] for member in silent if engine_of.get(member) in reasons}

    return members


def _culprits(attempt: "_Attempt", breaks: int) -> dict[str, str]:
    """Whom to go on without after so many breaks; nobody while it may have been chance. Raises TransferFailed."""
    if breaks <= UNEXPLAINED_BREAKS:
        return {}
    if not (culprits := attempt.suspects | attempt.blamed):
        raise TransferFailed(f"the links broke without anyone ending: {attempt.seen}")
    return culprits


@dataclass(frozen=True)
class _Attempt:
    whole: bool
    lost: dict[str, str]
    """Engines that will not get it, and why."""
    suspects: dict[str, str]
    """Engines at which wrong bytes were seen first."""
    blamed: dict[str, str]
    """The engine at which it stood still."""
    seen: str
    trainers: list[Message]
    figures: dict[str, float]


def _judge(
    current: _Round,
    members: Mapping[str, int],
    engine_of: Mapping[str, str],
    reports: Mapping[str, Message],
    waited_s: float,
) -> _Attempt:
    """What became of an attempt. Raises TransferFailed where a trainer rank failed."""
    trainers = {member: reports.get(member) for member in members if member not in engine_of}
    _check_trainers(trainers)
    lost: dict[str, str] = {}
    for member, engine_id in engine_of.items():
        if problem := _problem(reports.get(member), waited_s):
            lost.setdefault(engine_id, f"{engine_id} ({member}): {problem}")
    broken = {member: report["broken"] for member, report in reports.items() if "broken" in report}
    suspects = {} if lost or broken else _wrong_bytes(current, members, engine_of, reports)
    culprits = {} if lost else blamed(current.transfers, members, engine_of, reports)
    named = [*broken.items(), *suspects.items()]
    seen = "; ".join(f"{who}: {what}" for who, what in named[:4])
    answered = [reports[member] for member in engine_of if member in reports and "received_bytes" in reports[member]]
    figures = {
        "received_bytes": float(sum(report["received_bytes"] for report in answered)),
        "slowest_s": max((report["seconds"] for report in answered), default=0.0),
    }
    whole = not (lost or broken or suspects)
    return _Attempt(whole, lost, suspects, culprits, seen, [report for report in trainers.values() if report], figures)


def _wrong_bytes(
    current: _Round, members: Mapping[str, int], engine_of: Mapping[str, str], reports: Mapping[str, Message]
) -> dict[str, str]:
    """Engines that took in other bytes than were sent, though who passed them on had the right ones."""
    sent: dict[int, int] = {}
    for member in members.keys() - engine_of.keys():
        sent |= read_checksums(reports[member]["checksums"])
    wrong = {
        (members[member], parcel): member
        for member in engine_of
        for parcel, value in read_checksums(reports[member]["checksums"]).items()
        if sent.get(parcel) != value
    }
    found: dict[str, str] = {}
    transfers = current.transfers
    for sender, receiver, parcel in zip(
        transfers.sender.tolist(), transfers.receiver.tolist(), transfers.parcel.tolist(), strict=True
    ):
        at = wrong.get((receiver, parcel))
        if at is not None and (sender, parcel) not in wrong:
            engine_id = engine_of[at]
            what = f"{engine_id} ({at}): parcel {parcel} came with other bytes than member {sender} has"
            found.setdefault(engine_id, what)
    return found


def _problem(report: Message | None, waited_s: float) -> str | None:
    if report is None:
        return f"no answer within {waited_s:g} s"
    return None if report["ok"] else str(report["error"])


def _check_trainers(reports: Mapping[str, Message | None]) -> None:
    for member, report in reports.items():
        if report is None:
            raise TransferFailed(f"{member} does not answer; has it ended? Its log says why")
        if not report["ok"]:
            raise TransferFailed(f"{member}: {report['error']}")
