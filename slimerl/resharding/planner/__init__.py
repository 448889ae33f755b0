"""The planner: which rank sends which bytes to whom, in which order, near the physical limit and provably complete.

Read in this order: `templates` (a weight once, as both sides cut it), `records` (common refinement), `atoms` (layers,
experts, owners, demands), `waterfill` (who sends), `parcels` (network operations), `entries` (by which NIC), `rings`
(relay and rounds), `cover` (the proof), `make` (all of it), `share` (one rank's part), `resume` (after a death).
"""

from slimerl.resharding.planner.bounds import Bounds
from slimerl.resharding.planner.cache import PlanCache
from slimerl.resharding.planner.make import make_plan, make_template, without
from slimerl.resharding.planner.plan import Operations, Plan
from slimerl.resharding.planner.resume import resume
from slimerl.resharding.planner.shape import PlanOptions, SyncShape
from slimerl.resharding.planner.share import Segments, Share, engine_share, trainer_share
from slimerl.resharding.planner.topology import MOST_GPUS, Topology

__all__ = [
    "MOST_GPUS",
    "Bounds",
    "Operations",
    "Plan",
    "PlanCache",
    "PlanOptions",
    "Segments",
    "Share",
    "SyncShape",
    "Topology",
    "engine_share",
    "make_plan",
    "make_template",
    "resume",
    "trainer_share",
    "without",
]
