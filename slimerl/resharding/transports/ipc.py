"""`ipc`: engines on the trainer's machine read full tensors out of shared memory.

Flows in: buckets of logical tensors in the engine's dtype. Flows out: weights in every engine rank, and digests of
what lies there afterwards. Invariants: a bucket's memory is refilled only after every rank of every engine that is
left has answered for its last use; an engine that fails is set aside by name (`fleet.failures`), the others go on.

Two buckets alternate, so that the next one is filled while the engines read the last. On a GPU the engine copies
from this host memory to its device.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet, Pending
from slimerl.engine.inside.shared_bucket import SharedBucket
from slimerl.resharding.coverage import CoverageError, check_parameters, some_names
from slimerl.resharding.proof import ProofError, WeightProof
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.resharding.transports.message import ReportDesk

_SLOTS = 2

Reports = list[dict[str, Any]]
"""One report per tensor-parallel rank."""


_MessageOfRank = Callable[[int], dict[str, Any]]


class NothingSent(ValueError):
    """An update that lacks tensors would pass for a whole one."""


@dataclass
class _Slot:
    memory: SharedBucket
    pending: Pending[Reports] | None = None


class IpcCarrier:
    """One weight update: `check`, then `send` every bucket, then `prove`. Use as a context manager.

    Every engine must be paused, and in an update session while `send` and `prove` run (`EngineFleet`).
    """

    def __init__(self, fleet: EngineFleet, bucket_bytes: int, timeout_s: float) -> None:
        """`timeout_s` bounds each engine's work on one bucket, and on the proof."""
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._desk = ReportDesk(timeout_s)
        self._slots = [_Slot(SharedBucket(bucket_bytes)) for _ in range(_SLOTS)]
        self._session = secrets.token_bytes(16)
        self._buckets = 0
        self._shapes: dict[str, list[int]] = {}
        """Of every tensor sent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Engines that still read keep their view of the memory; nobody can open it any more."""
        for slot in self._slots:
            slot.memory.close()
        self._desk.close()

    def describe(self) -> dict[str, list[dict[str, dict[str, Any]]]]:
        """By engine, for each rank: parameter → `shape`, `dtype`, `stride`."""
        reports = self._ask_all(lambda _rank: {"op": "describe"})
        return {engine_id: [report["parameters"] for report in ranks] for engine_id, ranks in reports.items()}

    def check(self, tensors: Sequence[LogicalTensor], placements: Sequence[Sequence[Placement]]) -> None:
        """Before the first byte: do the engines' parameters fit the plan? Those that do not are set aside.

        Args:
            tensors: what will be sent, in the dtypes in which it will be sent.
            placements: of each rank of an engine.

        Raises:
            NoEngineLeft: none fits.
        """
        dtypes = {tensor.name: str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        for engine_id, ranks in self.describe().items():
            for rank, (parameters, placed) in enumerate(zip(ranks, placements, strict=True)):
                if problem := _misfit(parameters, placed, dtypes):
                    self._fleet.set_aside(engine_id, f"{engine_id} rank {rank}: {problem}")
        self._fleet.check_some_left()

    def send(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy one bucket into shared memory and let the engines load it; returns before they have.

        Fused tensors (q, k, v; gate, up) belong into one bucket. Failures show at a later call.

        Raises:
            NothingSent: the bucket is empty.
            NoEngineLeft: all engines have failed.
        """
        if not bucket:
            raise NothingSent("a bucket without tensors; split_into_buckets makes none")
        slot = self._slots[self._buckets % _SLOTS]
        self._wait_for(slot)
        tag = self._session + self._buckets.to_bytes(8, "little")
        self._buckets += 1
        entries = slot.memory.fill(tag, bucket)
        self._shapes |= {entry["name"]: entry["shape"] for entry in entries}
        message = {"op": "load", "bucket": slot.memory.address, "tag": tag.hex(), "entries": entries}
        slot.pending = self._fleet.start(lambda client: self._ask(client, lambda _rank: message))

    def wait(self) -> None:
        """Until every engine has loaded all that was sent. Raises NoEngineLeft when all have failed."""
        for slot in self._slots:
            self._wait_for(slot)

    def verify(
        self, version: int, placements: Sequence[Sequence[Placement]], granules: Mapping[str, int]
    ) -> dict[str, list[dict[str, int]]]:
        """Wait until the engines have loaded everything; then by engine, for each rank: tensor → digest of its part.

        Args:
            placements: of each rank of an engine.
            granules: of each tensor, `WeightProof.granules`.

        Raises:
            NothingSent: a placed tensor was never sent; the message names it.
            NoEngineLeft: all engines have failed.
        """
        if unsent := {place.tensor for rank in placements for place in rank if place.tensor} - self._shapes.keys():
            raise NothingSent(f"version {version}: tensors of the plan were never sent: {some_names(unsent)}")
        self.wait()
        wire = [[self._wire(placement, granules) for placement in rank] for rank in placements]
        reports = self._ask_all(lambda rank: {"op": "verify", "version": version, "placements": wire[rank]})
        return {engine_id: [report["digests"] for report in ranks] for engine_id, ranks in reports.items()}

    def prove(self, version: int, placements: Sequence[Sequence[Placement]], proof: WeightProof) -> list[str]:
        """Compare what lies in every rank of every engine with what was sent; returns the engines that hold it.

        The others are set aside. Raises as `verify`.
        """
        for engine_id, reports in self.verify(version, placements, proof.granules).items():
            try:
                proof.check(engine_id, reports)
            except ProofError as error:
                self._fleet.set_aside(engine_id, str(error))
        self._fleet.check_some_left()
        return self._fleet.left

    def _wire(self, placement: Placement, granules: Mapping[str, int]) -> dict[str, Any]:
        return {
            "parameter": placement.parameter,
            "at": [placement.at.starts, placement.at.stops],
            "tensor": placement.tensor,
            "box": [placement.box.starts, placement.box.stops],
            "shape": self._shapes.get(placement.tensor),
            "granule": granules.get(placement.tensor),
        }

    def _wait_for(self, slot: _Slot) -> None:
        """The memory may be refilled: every rank of every engine left has answered."""
        if slot.pending is None:
            return
        pending, slot.pending = slot.pending, None
        for engine_id, reports in pending.results().items():
            if problem := _load_problem(reports):
                self._fleet.set_aside(engine_id, f"{engine_id} {problem}")
        self._fleet.check_some_left()

    async def _ask(self, client: EngineClient, message: _MessageOfRank) -> Reports:
        ranks = range(self._fleet.tensor_parallel[client.engine_id])
        return await self._desk.ask(client, [message(rank) for rank in ranks], timeout_s=self._timeout_s)

    def _ask_all(self, message: _MessageOfRank) -> dict[str, Reports]:
        return self._fleet.each(lambda client: self._ask(client, message))


def _misfit(
    parameters: Mapping[str, Mapping[str, Any]], placements: Sequence[Placement], dtypes: Mapping[str, str]
) -> str | None:
    try:
        check_parameters(placements, {name: tuple(parameter["shape"]) for name, parameter in parameters.items()})
    except CoverageError as error:
        return str(error)
    for placement in placements:
        kept, sent = parameters[placement.parameter]["dtype"], dtypes.get(placement.tensor)
        if not placement.is_padding and kept != sent:
            return f"{placement.parameter} is {kept}, but {placement.tensor} would be sent as {sent}"
    return None


def _load_problem(reports: Reports) -> str | None:
    """A tensor may be of no concern to one rank (another's expert), but not to all of them."""
    ignored = set(reports[0]["ignored"]).intersection(*(report["ignored"] for report in reports))
    if ignored:
        return f"does not know these tensors and ignored them: {some_names(ignored)}"
    converted = {tuple(conversion) for report in reports for conversion in report["converted"]}
    if converted:
        shown = some_names(f"{name} ({sent} into {kept})" for name, sent, kept in converted)
        return f"keeps tensors in another dtype than they were sent in: {shown}"
    return None
