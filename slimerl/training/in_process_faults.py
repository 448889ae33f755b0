"""Where a trainer's ranks cannot begin anew in their processes (`in_process.py`). Pure.

Flows in: a spec, what the machine has. Flows out: a line for each obstacle, with the way out.
"""

from slimerl.resilience.rank_monitor import PACKAGE
from slimerl.spec import RunSpec
from slimerl.spec.agent import ExternalAgent


def in_process_faults(spec: RunSpec, cuda: bool, installed: bool) -> list[str]:
    """What stands against `resilience.in_process_restarts`. Args: `installed`: is the package there?"""
    if not spec.resilience.in_process_restarts:
        return []
    faults = []
    if spec.takes_turns(cuda):
        faults.append("engines hold the GPUs' memory while the trainer begins anew; cluster.placement: disaggregated")
    if spec.rollout.processes > 1:
        faults.append("several rollout processes begin anew with the run alone; rollout.processes: 1")
    if spec.rollout.on_update == "in_place":
        faults.append("engines may keep caches of a version that is trained again; rollout.on_update: retract")
    if isinstance(spec.agent, ExternalAgent):
        faults.append("agent programs would lose the address that they were given; another agent")
    if cuda and not installed:
        faults.append(f"{PACKAGE}, which aborts NCCL, is not installed; pip install -r requirements-gpu.txt")
    return [f"resilience.in_process_restarts: {fault}, or set it to 0" for fault in faults]
