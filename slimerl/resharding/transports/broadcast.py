"""`broadcast`: the sender and all ranks of all engines form a process group; each bucket crosses it once.

Flows in: buckets. Flows out: flat bytes over NCCL, where every member has a GPU of its own, else over gloo.
Invariants: the group is opened once for an update and serves all its buckets; an engine that dies or stands still
costs the others one timeout: who does not answer is set aside by name, the group is made anew of the rest, and the
bucket that broke is sent to them again, whole. Loading a bucket twice changes nothing; the proof sees the outcome.

How a culprit is told from its victims: a victim's wait ends first, and it reports that the group broke. Who is dead
or stands still reports nothing before its call's deadline, which is three times as long.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet, NoEngineLeft, Pending
from slimerl.engine.inside.cuda_bucket import gpu_uuid
from slimerl.engine.inside.packed import Entry, NamedTensor, pack, packed_bytes
from slimerl.engine.inside.sources import Source
from slimerl.engine.inside.weight_group import SENDER, GroupAddress, GroupBroken, WeightGroup
from slimerl.resharding.transports.carrier import Carrier, NothingSent, Reports

GROUP_SHARE = 1 / 3
"""Of an engine's timeout: how long a member waits for the others."""
_UNEXPLAINED_BREAKS = 1
"""How often the group may break in one update without an engine to blame (a reset connection)."""


@dataclass
class _Bucket:
    flat: torch.Tensor
    """Kept until the engines have loaded it: it may have to be sent again."""
    entries: list[Entry]
    pending: Pending[Reports] | None = None
    sender_broke: str | None = None


class BroadcastCarrier(Carrier):
    """One bucket is under way at a time: engines load it while the next one is gathered."""

    def __init__(self, fleet: EngineFleet, timeout_s: float) -> None:
        super().__init__(fleet, timeout_s)
        self._group: WeightGroup | None = None
        self._members: list[str] = []
        self._last: _Bucket | None = None
        self._unexplained = 0

    def _unanswered(self) -> Sequence[Pending[Reports]]:
        pending = None if self._last is None else self._last.pending
        return [] if pending is None else [pending]

    def _dispose(self) -> None:
        if self._group is not None:
            self._close_group()
            # Where this does not arrive, the next update closes what is left over.
            with suppress(NoEngineLeft):
                self.ask_all(lambda _client, _rank: {"op": "leave"})

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        if not bucket:
            raise NothingSent("a bucket without tensors; split_into_buckets makes none")
        self.wait()
        device = bucket[0][1].device
        self._open_group(device)
        assert self._group is not None
        flat = torch.empty(packed_bytes(bucket), dtype=torch.uint8, device=self._group.device)
        self._last = _Bucket(flat, pack(flat, bucket))
        self._shapes |= {entry["name"]: entry["shape"] for entry in self._last.entries}
        self._transfer(self._last)

    def wait(self) -> None:
        while (bucket := self._last) is not None:
            assert bucket.pending is not None
            reports = bucket.pending.results()
            broken = _broken(reports, bucket.sender_broke)
            self.accept({engine_id: ranks for engine_id, ranks in reports.items() if engine_id not in broken})
            if not broken:
                self._last = None
                return
            self._close_group()
            self._explain(broken)
            self._open_group(bucket.flat.device)
            self._transfer(bucket)

    def _transfer(self, bucket: _Bucket) -> None:
        """Announce the bucket to every engine, then send it. A break is kept for `wait`."""
        assert self._group is not None
        source: Source = {"kind": "broadcast", "key": self._group.key, "nbytes": bucket.flat.numel()}
        message = {"op": "load", "source": source, "entries": bucket.entries}
        bucket.pending = self.start_all(lambda _client, _rank: message)
        bucket.sender_broke = None
        try:
            self._group.broadcast(bucket.flat)
        except GroupBroken as error:
            bucket.sender_broke = str(error)
            self._close_group()

    def _open_group(self, device: torch.device) -> None:
        """Make a group of the sender and the engines left, unless there is one of just these."""
        while self._group is None or self._members != self.fleet.left:
            self._close_group()
            self._group, broken = self._join(device)
            if broken:
                self._close_group()
                self._explain(broken)

    def _join(self, device: torch.device) -> tuple[WeightGroup | None, dict[str, str]]:
        backend = self._backend(device)
        self._members = self.fleet.left
        sizes = [self.fleet.tensor_parallel[engine_id] for engine_id in self._members]
        first_rank = {engine_id: SENDER + 1 + sum(sizes[:at]) for at, engine_id in enumerate(self._members)}
        address: GroupAddress = {
            "host": self.desk.host,
            "port": self.desk.port,
            "key": secrets.token_hex(16),
            "size": 1 + sum(sizes),
            "backend": backend,
            "timeout_s": self.timeout_s * GROUP_SHARE,
        }

        def join(client: EngineClient, _rank: int) -> dict[str, object]:
            return {"op": "join", "group": address, "first_rank": first_rank[client.engine_id]}

        pending = self.start_all(join)
        try:
            group, problem = WeightGroup(address, SENDER), None
        except GroupBroken as error:
            group, problem = None, str(error)
        return group, _broken(pending.results(), problem)

    def _backend(self, device: torch.device) -> str:
        """NCCL refuses two members on one GPU, and members without."""
        if device.type != "cuda":
            return "gloo"
        gpus = [report["gpu"] for ranks in self.describe().values() for report in ranks]
        gpus.append(gpu_uuid(device))
        return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _explain(self, broken: dict[str, str]) -> None:
        """The group broke: go on if an engine was to blame, or once without. Raises NoEngineLeft."""
        if self._members != self.fleet.left:
            return
        self._unexplained += 1
        if self._unexplained > _UNEXPLAINED_BREAKS:
            for engine_id in self.fleet.left:
                seen = "; ".join(f"{who}: {what}" for who, what in broken.items())
                self.fleet.set_aside(engine_id, f"{engine_id}: the broadcast group broke without anyone ending: {seen}")
        self.fleet.check_some_left()


def _broken(reports: dict[str, Reports], sender: str | None) -> dict[str, str]:
    """Who saw the group break, and what it saw: engines by their first rank that did, and the sender."""
    found = {} if sender is None else {"the sender": sender}
    for engine_id, ranks in reports.items():
        if seen := [report["broken"] for report in ranks if "broken" in report]:
            found[engine_id] = seen[0]
    return found
