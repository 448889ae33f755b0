"""Plans that were made once: a sync looks its plan up by the key of its shape.

Invariant: nothing is made again while models, layouts, living replicas and NIC speeds stay the same.
"""

from collections import OrderedDict

from slimerl.resharding.planner.make import make_plan
from slimerl.resharding.planner.plan import Plan
from slimerl.resharding.planner.shape import SyncShape


class PlanCache:
    """The last few plans, by key."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def plan(self, shape: SyncShape) -> Plan:
        """As `make_plan`, which is called only for a shape that is new or was forgotten."""
        return self._plans.get(shape.key) or self.keep(make_plan(shape))

    def keep(self, plan: Plan) -> Plan:
        """Remember a plan made elsewhere, such as one without a dead engine."""
        self._plans[plan.shape.key] = plan
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)
        return plan
