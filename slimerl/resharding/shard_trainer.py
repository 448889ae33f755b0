"""A trainer rank as a member of a `shards` sync: it sends its own part of the model, and nothing else.

Flows in: orders. Flows out: parcels over its links; for the coordinator, checksums of what it sent and the digests of
what engines must hold of it. Invariant: its plan is the coordinator's (their digests are compared before the first
byte), and its parameters stay as they are until the coordinator says that the sync has ended.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slimerl.engine.inside.carry import Traffic
from slimerl.engine.inside.links import LinkBroken, broken_report
from slimerl.engine.inside.mailbox import Mailbox
from slimerl.engine.inside.parcels import Contents, decode, encode
from slimerl.engine.inside.receiver import open_traffic
from slimerl.resharding.coverage import check_parameters
from slimerl.resharding.planner import Plan, PlanCache, SyncShape, trainer_share
from slimerl.resharding.shard_orders import share_message
from slimerl.resharding.shard_proof import Holders, SentDigests, holders_of, shard_granules
from slimerl.resharding.shard_quantise import WireParameters, scale_placements
from slimerl.resharding.shard_sender import Outbox
from slimerl.resharding.sync_plan import SyncPlan
from slimerl.resharding.tensors import Placement
from slimerl.resilience.deadline import Deadline, DeadlineExceeded

Message = dict[str, Any]
Parameters = Callable[[], Mapping[str, torch.Tensor]]


class PlansDiffer(RuntimeError):
    """Two ranks have planned the same sync differently."""


class ShardModel:
    """What every rank knows of a run's syncs: tensors, placements, plans by number of engines."""

    def __init__(
        self, plan: SyncPlan, trainer_ranks: Sequence[Sequence[Placement]], shape_of: Callable[[int], SyncShape]
    ) -> None:
        """
        Args:
            plan: tensors and the engine's ranks.
            trainer_ranks: placements of all trainer ranks.
            shape_of: the sync to so many engines.
        """
        self.tensors, self.engine_ranks, self.trainer_ranks = plan.by_name, plan.engine_ranks, trainer_ranks
        self.names = list(self.tensors)
        self.scales = plan.scales
        self.granules = shard_granules(plan.by_name, plan.engine_ranks, trainer_ranks, plan.scales)
        self.holders: Holders = holders_of(plan.engine_ranks)
        self._shape_of, self._plans = shape_of, PlanCache()

    def plan(self, engines: int) -> Plan:
        """For so many engines, made once. Raises LayoutError, CoverageError."""
        return self._plans.plan(self._shape_of(engines))


class TrainerMember:
    """One trainer rank."""

    def __init__(self, model: ShardModel, rank: int, parameters: Parameters, mailbox: Mailbox) -> None:
        self.rank, self.name = rank, f"trainer/{rank}"
        self._model, self._parameters, self._mailbox = model, parameters, mailbox
        self._planned: tuple[str, Contents, SentDigests] | None = None
        self._traffic: tuple[str, Traffic] | None = None

    def answer(self, order: Message) -> Message:
        """Carry out an order and return the report, on the coordinator's own rank. Never raises."""
        report = self._obey(order)
        self._close_what_broke(report)
        return report

    def answer_by_mail(self, order: Message) -> None:
        """First the report, which is waited for; then the links, of which many take long to close, so that the others
        notice. Raises CoordinatorGone."""
        report = self._obey(order)
        try:
            self._mailbox.report(report)
        finally:
            self._close_what_broke(report)

    def _close_what_broke(self, report: Message) -> None:
        if "broken" in report or not report["ok"]:
            self.close()

    def _obey(self, order: Message) -> Message:
        try:
            report = {"plan": self._plan, "transfer": self._transfer}[order["op"]](order)
            return {"ok": True, **report}
        except (LinkBroken, DeadlineExceeded) as error:
            return broken_report(error)
        except Exception as error:  # noqa: BLE001 (told to the coordinator, which ends the sync)
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        if self._traffic is not None:
            self._traffic[1].close()
            self._traffic = None

    def _plan(self, order: Message) -> Message:
        plan = self._model.plan(order["engines"])
        if plan.digest != order["plan"]:
            raise PlansDiffer(f"the plan of this rank has digest {plan.digest}, the coordinator's {order['plan']}")
        if self._planned is None or self._planned[0] != plan.digest:
            model, placements = self._model, self._model.trainer_ranks[self.rank]
            parameters = self._parameters()
            check_parameters(placements, {name: tuple(tensor.shape) for name, tensor in parameters.items()})
            contents = Contents.of(share_message(plan, trainer_share(plan, self.rank)))
            digests = sent_digests(model, contents, placements)
            self._planned = plan.digest, contents, digests
        return {}

    def _transfer(self, order: Message) -> Message:
        assert self._planned is not None, "a plan is ordered before its transfer"
        _, contents, digests = self._planned
        deadline = Deadline(f"transfer {order['transfer']}", order["timeout_s"])
        if self._traffic is None or self._traffic[0] != order["links"]:
            self.close()
            self._traffic = order["links"], open_traffic(self._mailbox, order)
        model, traffic, parameters = self._model, self._traffic[1], self._parameters()
        nccl = order["backend"] == "nccl"
        device = next(iter(parameters.values())).device if nccl else torch.device("cpu")
        if model.scales is not None:
            parameters = WireParameters(parameters, model.trainer_ranks[self.rank], model.tensors, model.scales)
        outbox = Outbox(contents, digests, traffic.steps, parameters, device)
        traffic.run(outbox, deadline)
        sums = torch.tensor(list(outbox.checksums.items()), dtype=torch.int64)
        return {"checksums": encode(sums), "digests": _as_text(digests.values, self._model.names)}


def sent_digests(model: ShardModel, contents: Contents, placements: Sequence[Placement]) -> SentDigests:
    """`placements`: of the sending rank."""
    made = scale_placements(placements, model.tensors, model.scales) if model.scales is not None else []
    return SentDigests(contents, [*placements, *made], model.tensors, model.holders, model.granules)


def _as_text(values: Mapping[tuple[int, str], int], names: Sequence[str]) -> str:
    number = {name: index for index, name in enumerate(names)}
    rows = [[rank, number[name], value - (value >> 63 << 64)] for (rank, name), value in values.items()]
    return encode(torch.tensor(rows, dtype=torch.int64))


def read_digests(text: str, names: Sequence[str]) -> dict[tuple[int, str], int]:
    """`SentDigests.values` of a report."""
    rows = decode(text).view(-1, 3).tolist()
    return {(rank, names[index]): value % (1 << 64) for rank, index, value in rows}


def read_checksums(text: str) -> dict[int, int]:
    """By parcel."""
    return dict(decode(text).view(-1, 2).tolist())
