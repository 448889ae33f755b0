"""Going on without an engine that died: what is left of a sync, given what has arrived.

Flows in: the plan under way, the replicas that died, which NIC holds which parcel, proven in staging. Flows out: the
plan for the others, whose operations are those that are still due. Invariant: with what is held already, every living
node gets each parcel of its route once, from who has it by then.

What a node holds is what one of its living NICs took in. Copies that such a NIC passed on inside the node do not count,
nor does what only a dead replica's NIC took in: both are sent again, into staging, where they change nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from slimerl.resharding.planner.cover import NONE_HELD, check_routes
from slimerl.resharding.planner.make import without
from slimerl.resharding.planner.plan import Operations, Plan
from slimerl.resharding.planner.templates import IntArray


def resume(plan: Plan, dead: Iterable[int], parcel: IntArray = NONE_HELD, nic: IntArray = NONE_HELD) -> Plan:
    """The plan without the replicas `dead`, of which only those operations are left that are still due.

    The result is an ordinary plan for who carries it out (`trainer_share` and `engine_share` select from it); an
    operation whose `after` is -1 starts with its sender: the parcel's trainer, or a NIC that holds it. Parcels keep
    their numbers, so that after another death this is called again, with the result and all that is held by then.

    Args:
        plan: the one under way, or what an earlier `resume` returned.
        parcel, nic: [held], in pairs: NIC `nic[i]` holds parcel `parcel[i]`, whole and proven. Of any NIC, the dead
            ones' included.

    Raises:
        LayoutError: no engine is left.
    """
    rest = without(plan, dead)
    node_of = rest.nodes.number_of(rest.topology.nics)
    total = rest.nodes.count
    operations = rest.operations
    held = np.flatnonzero(node_of[nic] >= 0)
    holder = np.full(len(rest.parcels) * total, -1, dtype=np.int32)
    holder[parcel[held] * total + node_of[nic[held]]] = nic[held]
    has_it = holder[operations.parcel * np.int64(total) + node_of[operations.receiver]]
    resumed = replace(rest, operations=_due(operations, has_it))
    check_routes(resumed, parcel, nic)
    return resumed


def _due(operations: Operations, holder: IntArray) -> Operations:
    """Without those whose node has the parcel: in NIC `holder[operation]`, -1 where it has not."""
    due = holder < 0
    number = np.cumsum(due) - 1
    after = operations.after[due]
    feeder = np.maximum(after, 0)
    # The node that is to pass the parcel on has it: perhaps by another NIC than the one by which this plan lets it in.
    at_hand = (after >= 0) & ~due[feeder]
    left = Operations(*(column[due] for column in operations))
    return left._replace(
        sender=np.where(at_hand, holder[feeder], left.sender).astype(np.int32),
        after=np.where((after >= 0) & ~at_hand, number[feeder], -1).astype(np.int32),
    )
