"""One weight update over any transport: describe, send bucket by bucket, verify. What a transport adds is `_stage`.

Flows in: buckets of logical tensors in the engine's dtype. Flows out: weights in every engine rank, and digests of
what lies there afterwards. Invariants: every transport goes through the same door of the engine, with the same reports
and the same proof; what a bucket was staged in is reused only after every rank of every engine that is left has
answered for it; an engine that fails is set aside by name (`fleet.failures`), the others go on.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from slimerl.engine.client import EngineClient
from slimerl.engine.fleet import EngineFleet, NoEngineLeft, Pending
from slimerl.engine.inside.packed import Entry, NamedTensor
from slimerl.engine.inside.sources import Source
from slimerl.resharding.coverage import CoverageError, check_parameters, some_names
from slimerl.resharding.proof import ProofError, WeightProof
from slimerl.resharding.tensors import LogicalTensor, Placement
from slimerl.resharding.transports.message import ReportDesk

IN_FLIGHT = 2
"""Buckets that engines may still be loading, so that the next one is filled while they read the last."""

Reports = list[dict[str, Any]]
"""One report per tensor-parallel rank."""

MessageOfRank = Callable[[int], dict[str, Any]]

SourceOfRank = Callable[[], Source]
"""Called once for each rank of each engine that will read."""


class NothingSent(ValueError):
    """An update that lacks tensors would pass for a whole one."""


@dataclass(frozen=True)
class Sent:
    number: int
    pending: Pending[Reports]


class Carrier:
    """One weight update: `check`, then `send` every bucket, then `prove`. Use as a context manager.

    Every engine must be paused, and in an update session from `check` to `close` (`EngineFleet`).
    """

    def __init__(self, fleet: EngineFleet, timeout_s: float) -> None:
        """`timeout_s` bounds each engine's work on one bucket, and on the proof."""
        self.fleet = fleet
        self.timeout_s = timeout_s
        self.desk = ReportDesk(timeout_s, fleet.hosts)
        self._in_flight: deque[Sent] = deque()
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
        """Waits for engines that still load: without the desk they could not report, and would try for long."""
        try:
            for pending in self._unanswered():
                with suppress(NoEngineLeft):
                    pending.results()
        finally:
            self._in_flight.clear()
            try:
                self._dispose()
            finally:
                self.desk.close()

    def _unanswered(self) -> Sequence[Pending[Reports]]:
        return [sent.pending for sent in self._in_flight]

    def _dispose(self) -> None:
        """Let go of what buckets were staged in; no engine reads any more."""

    def describe(self) -> dict[str, Reports]:
        """By engine, for each rank: `parameters` (name → `shape`, `dtype`, `stride`), `gpu`, the one that holds them
        (or None), `gpus`, those that it sees, and `holds`, the version that it was last proven to have (or None)."""
        return self.ask_all(lambda _client, _rank: {"op": "describe"})

    def check(self, tensors: Sequence[LogicalTensor], placements: Sequence[Sequence[Placement]]) -> None:
        """Before the first byte: do the engines' parameters fit the plan? Those that do not are set aside.

        Args:
            tensors: what will be sent, in the dtypes in which it will be sent.
            placements: of each rank of an engine.

        Raises:
            NoEngineLeft: none fits.
        """
        dtypes = {tensor.name: str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        for engine_id in self.fleet.left:
            size = self.fleet.tensor_parallel[engine_id]
            if size != len(placements):
                self.fleet.set_aside(engine_id, f"{engine_id} has {size} ranks, the plan is for {len(placements)}")
        for engine_id, ranks in self.describe().items():
            for rank, (report, placed) in enumerate(zip(ranks, placements, strict=True)):
                if problem := misfit(report["parameters"], placed, dtypes):
                    self.fleet.set_aside(engine_id, f"{engine_id} rank {rank}: {problem}")
        self.fleet.check_some_left()

    def send(self, bucket: Sequence[NamedTensor]) -> None:
        """Let the engines load one bucket; returns before they have. The tensors may be changed afterwards.

        Fused tensors (q, k, v; gate, up) belong into one bucket. Failures show at a later call.

        Raises:
            NothingSent: the bucket is empty.
            NoEngineLeft: all engines have failed.
        """
        if not bucket:
            raise NothingSent("a bucket without tensors; split_into_buckets makes none")
        while len(self._in_flight) >= IN_FLIGHT:
            self._settle_oldest()
        source, entries = self._stage(self._buckets, bucket)
        self._shapes |= {entry["name"]: entry["shape"] for entry in entries}
        pending = self.start_all(lambda _client, _rank: {"op": "load", "source": source(), "entries": entries})
        self._in_flight.append(Sent(self._buckets, pending))
        self._buckets += 1

    def wait(self) -> None:
        """Until every engine has loaded all that was sent. Raises NoEngineLeft when all have failed."""
        while self._in_flight:
            self._settle_oldest()

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
        wire = [
            [place.message(self._shapes.get(place.tensor), granules.get(place.tensor)) for place in rank]
            for rank in placements
        ]
        reports = self.ask_all(lambda _client, rank: {"op": "verify", "version": version, "placements": wire[rank]})
        return {engine_id: [report["digests"] for report in ranks] for engine_id, ranks in reports.items()}

    def prove(self, version: int, placements: Sequence[Sequence[Placement]], proof: WeightProof) -> list[str]:
        """Compare what lies in every rank of every engine with what was sent; returns the engines that hold it.

        The others are set aside. Raises as `verify`.
        """
        for engine_id, reports in self.verify(version, placements, proof.granules).items():
            try:
                proof.check(engine_id, reports)
            except ProofError as error:
                self.fleet.set_aside(engine_id, str(error))
        self.fleet.check_some_left()
        return self.fleet.left

    # --- what a transport adds

    def _stage(self, number: int, bucket: Sequence[NamedTensor]) -> tuple[SourceOfRank, list[Entry]]:
        """Put bucket `number` where engines can read it; says where, to each rank that will read."""
        raise NotImplementedError

    def _settled(self, number: int) -> None:
        """Every engine left has answered for bucket `number`."""

    # --- calls

    def accept(self, reports: Mapping[str, Reports]) -> None:
        """Set aside the engines that did not load what they were told to. Raises NoEngineLeft."""
        for engine_id, ranks in reports.items():
            if problem := _load_problem(ranks):
                self.fleet.set_aside(engine_id, f"{engine_id} {problem}")
        self.fleet.check_some_left()

    async def ask(self, client: EngineClient, message: MessageOfRank) -> Reports:
        ranks = range(self.fleet.tensor_parallel[client.engine_id])
        return await self.desk.ask(client, [message(rank) for rank in ranks], timeout_s=self.timeout_s)

    def ask_all(self, message: Callable[[EngineClient, int], dict[str, Any]]) -> dict[str, Reports]:
        return self.start_all(message).results()

    def start_all(self, message: Callable[[EngineClient, int], dict[str, Any]]) -> Pending[Reports]:
        return self.fleet.start(lambda client: self.ask(client, lambda rank: message(client, rank)))

    def _settle_oldest(self) -> None:
        sent = self._in_flight.popleft()
        self.accept(sent.pending.results())
        self._settled(sent.number)


def misfit(
    parameters: Mapping[str, Mapping[str, Any]], placements: Sequence[Placement], dtypes: Mapping[str, str]
) -> str | None:
    """Why the parameters that a rank describes cannot take what the plan sends, or None.

    Args:
        dtypes: of each tensor, as it is sent.
    """
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
