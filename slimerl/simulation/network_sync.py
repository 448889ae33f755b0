"""A plan on the model of `network.py`: transfers of its operations, copies inside the nodes, faults.

Flows in: a plan, how its links really are. Flows out: seconds, against the plan's lower bound.
Invariant: what is simulated is what `Plan.operations` says; a fault changes the links, never the plan, unless the
fault's remedy says how.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from slimerl.resharding.planner import Plan, resume
from slimerl.simulation.network import Links, Transfers, bounce, simulate


@dataclass(frozen=True)
class Conditions:
    """How the network is, beside the topology's speeds."""

    latency_s: float = 10e-6
    overhead_s: float = 5e-6
    jitter: float = 0.0
    slow: tuple[tuple[int, float], ...] = ()
    """NICs below full speed that the plan does not know of: (number, fraction)."""
    bounce_share: float | None = None
    """What a slow engine NIC still takes in itself; its node's other NICs take the rest. None: it takes all."""
    seed: int = 0


@dataclass(frozen=True)
class SyncTime:
    """A simulated sync."""

    seconds: float
    """Until the last byte lies on its GPU."""
    network_s: float
    """Until the last parcel is in its last node."""
    bound_s: float
    """No plan is faster on healthy links."""
    busy: NDArray[np.float64] = field(repr=False)
    """[2, nics]: part of the time spent sending, and receiving."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.bound_s


def simulate_sync(plan: Plan, conditions: Conditions | None = None) -> SyncTime:
    """One whole sync."""
    conditions = Conditions() if conditions is None else conditions
    transfers, links = _transfers(plan), _links(plan, conditions)
    for nic, _ in conditions.slow:
        if conditions.bounce_share is not None and nic >= plan.topology.trainer_ranks:
            transfers = bounce(transfers, nic, _mates(plan, nic), conditions.bounce_share)
    outcome = simulate(transfers, links, conditions.seed)
    end = max(outcome.seconds, _fan_out_end(plan, transfers, outcome.end_s))
    return SyncTime(end, outcome.seconds, plan.template.bounds.seconds, outcome.busy_s / end)


def simulate_death(
    plan: Plan, dead: int, at_s: float, notice_s: float, replan_s: float, conditions: Conditions | None = None
) -> SyncTime:
    """Engine `dead` stops at `at_s`. After `notice_s` the sync is aborted, and after `replan_s` it goes on by a plan
    without the engine, with what the other nodes have by then."""
    conditions = Conditions() if conditions is None else conditions
    links = _links(plan, conditions)
    first = simulate(_transfers(plan), links, conditions.seed, stop_s=at_s)
    done = np.isfinite(first.end_s)
    parcel, nic = plan.operations.parcel[done].astype(np.int64), plan.operations.receiver[done].astype(np.int64)
    second = simulate(_transfers(resume(plan, [dead], parcel, nic)), links, conditions.seed + 1)
    seconds = at_s + notice_s + replan_s + second.seconds
    return SyncTime(seconds, seconds, plan.template.bounds.seconds, (first.busy_s + second.busy_s) / seconds)


def _transfers(plan: Plan) -> Transfers:
    operations = plan.operations
    return Transfers(
        operations.sender.astype(np.int64),
        operations.receiver.astype(np.int64),
        plan.parcels.nbytes[operations.parcel],
        operations.after.astype(np.int64),
        operations.round.astype(np.int64),
    )


def _links(plan: Plan, conditions: Conditions) -> Links:
    speeds = replace(plan.topology, slow=(*plan.topology.slow, *conditions.slow)).nic_speeds()
    return Links(speeds, conditions.latency_s, conditions.overhead_s, conditions.jitter)


def _mates(plan: Plan, nic: int) -> NDArray[np.int64]:
    member, node, _ = (axis[0] for axis in np.nonzero(plan.nodes.nic == nic))
    mates = plan.nodes.nic[member, node]
    return mates[(mates >= 0) & (mates != nic)]


def _fan_out_end(plan: Plan, transfers: Transfers, end_s: NDArray[np.float64]) -> float:
    """When the last copy over NVLink is there: each GPU passes on, in order of arrival, what others of its node want.

    A queue's end is the latest, over all arrivals, of that arrival and everything that comes from it on.
    """
    atoms = plan.template.atoms
    wanted = np.zeros((len(plan.parcels), *atoms.demands.shape[1:]))
    nbytes = plan.fragments.nbytes(atoms)
    np.add.at(wanted, plan.parcel_of_fragment, atoms.demands[atoms.demand[plan.fragments.atom]] * nbytes[:, None, None])
    slot_of = np.full(plan.topology.nics, -1)
    present = plan.nodes.nic >= 0
    slot_of[plan.nodes.nic[present]] = np.nonzero(present)[2]
    parcel, node = plan.operations.parcel, plan.operations.node
    beside = wanted.sum(axis=2)[parcel, node] - wanted[parcel, node, slot_of[transfers.receiver]]
    order = np.lexsort((end_s, transfers.receiver))
    receiver = transfers.receiver[order]
    spent = (beside / plan.topology.nvlink_bytes_per_s)[order]
    total = np.cumsum(spent)
    starts = np.flatnonzero(np.r_[True, receiver[1:] != receiver[:-1]])
    last = np.r_[starts[1:], len(receiver)] - 1
    until_end = np.repeat(total[last], np.diff(np.r_[starts, len(receiver)])) - total + spent
    return float((end_s[order] + until_end).max())
