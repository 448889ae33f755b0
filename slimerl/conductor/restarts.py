"""What is started again where it failed: an engine in the running run, or the whole run from its newest checkpoint.

Flows in: `RoleFailed`s. Flows out: new role processes, or leave to start over; each is said, and counted in the record.
Invariant: whatever is refused here ends the run with the failure's own message and the reason.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from slimerl.conductor.step import start_role
from slimerl.conductor.supervise import RoleFailed, RoleProcess
from slimerl.resilience.deadline import DeadlineExceeded
from slimerl.resilience.failure_kinds import RestartBudget
from slimerl.samples.messages import EngineInfo, EngineLost, process_of, read_address
from slimerl.spec import RunSpec
from slimerl.spec.evaluation_engines import evaluation_engines
from slimerl.telemetry.run_log import (
    EVENTS_FILE,
    RESIZED,
    RESTARTED,
    append_event,
    exported,
    newest_step,
    read_records,
)
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR
from slimerl.training.checkpoint.local import newest_checkpoint, unusable_names
from slimerl.training.rollout_client import RolloutClient, ServiceFailed

NO_ROOM = 2**20
"""Bytes."""
REPORT_S = 5.0
"""For the rollout role to take note of an engine's end."""

Say = Callable[[str], None]


class EngineRestarts:
    """Of all engines of a run."""

    def __init__(self, spec: RunSpec, say: Say) -> None:
        self._spec, self._say = spec, say
        self._budgets: dict[str, RestartBudget] = {}

    def replace_ended(self, roles: list[RoleProcess]) -> None:
        """Start engines that ended again, in place. Where any other role has ended, nothing: that is to be told."""
        ended = [role for role in roles if role.exit_code is not None]
        if any(role.role.engine_id is None for role in ended):
            return
        for role in ended:
            self._replace(roles, role)

    def _replace(self, roles: list[RoleProcess], role: RoleProcess) -> None:
        failure, engine_id = role.failure(), role.role.engine_id or ""
        allowed = self._spec.resilience.engine_restarts
        budget = self._budgets.setdefault(engine_id, RestartBudget(allowed))
        versions = self._report(engine_id, failure.summary)
        refusal = budget.refusal(failure.kind, versions, self._impossible)
        if refusal is not None:
            self._report(engine_id, failure.summary, returns_s=0.0)
            if not self._can_be_spared(roles, role):
                raise failure.because(f"{engine_id} is not started again: {refusal}")
            roles.remove(role)
            role.end(0.0)
            text = f"{failure.summary}; it was added while the run went on, and is given up: {refusal}"
            self._say(text)
            append_event(self._spec.run_dir, max(0, newest_step(self._spec.run_dir)), "note", RESIZED, text)
            return
        role.end(0.0)
        roles[roles.index(role)] = start_role(role.role, role.log_path.parent)
        text = f"{failure.summary}; started again ({budget.used} of {allowed}), it serves after a weight sync"
        self._say(text)
        record_restart(self._spec.run_dir, text)

    def _can_be_spared(self, roles: list[RoleProcess], ended: RoleProcess) -> bool:
        """One more than the spec names; and each rollout process has another, that does not evaluate alone."""
        processes, first_added = self._spec.rollout.processes, self._spec.engine.replicas
        evaluators = {f"engine-{number}" for number in evaluation_engines(self._spec)}
        others = {role.role.engine_id for role in roles if role is not ended and role.exit_code is None} - evaluators
        served = {process_of(engine_id, processes) for engine_id in others if engine_id is not None}
        number = int((ended.role.engine_id or "engine-0").removeprefix("engine-"))
        return number >= first_added and len(served) == processes

    def _impossible(self) -> str:
        if self._spec.takes_turns(has_cuda()):
            return "it would start on GPUs whose memory the trainer may hold; the run starts over instead"
        return ""

    def _report(self, engine_id: str, reason: str, returns_s: float | None = None) -> float:
        """Tell the rollout role, so that no request waits for the engine in vain; returns how many versions the engine
        has served."""
        back_s = self._spec.deadlines.start_s if returns_s is None else returns_s
        was = tell_lost(self._spec, EngineLost(engine_id, reason, back_s))
        return 0.0 if was is None else was.version + 1.0


class RunRestarts:
    """Of one run."""

    def __init__(self, spec: RunSpec, say: Say) -> None:
        self._spec, self._say = spec, say
        self._budget = RestartBudget(spec.resilience.run_restarts)
        self._text = ""

    def start_over(self, failure: RoleFailed) -> bool:
        """Every role has ended: may the run start over? Returns whether from its beginning (no checkpoint is there).

        Raises RoleFailed: it may not.
        """
        recorded = newest_step(self._spec.run_dir) + 1
        refusal = full_disk(self._spec.run_dir) or self._budget.refusal(failure.kind, recorded, self._impossible)
        if refusal is not None:
            raise failure.because(f"the run does not start over: {refusal}")
        newest = newest_checkpoint(self._spec.run_dir / CHECKPOINTS_DIR)
        where = "from its beginning, for it has no checkpoint yet" if newest is None else f"after step {newest}"
        self._text = f"{failure.summary}; the run goes on {where} ({self._budget.used} of {self._budget.allowed})"
        self._say(self._text)
        return newest is None

    def record(self) -> None:
        """What `start_over` said, once the record of the start to come is there."""
        record_restart(self._spec.run_dir, self._text, alone=True)

    def _impossible(self) -> str:
        run_dir = self._spec.run_dir
        if not self._spec.checkpoint.every_steps:
            return "it keeps no checkpoints (checkpoint.every_steps: 0)"
        if self._spec.checkpoint.resume == "never":
            return "checkpoint.resume: never"
        if exported(read_records(run_dir / EVENTS_FILE)):
            return "its model is written already"
        unusable = unusable_names(run_dir / CHECKPOINTS_DIR)
        if unusable and newest_checkpoint(run_dir / CHECKPOINTS_DIR) is None:
            return f"of its checkpoints none can be used: {', '.join(unusable)}"
        return ""


def tell_lost(spec: RunSpec, lost: EngineLost) -> EngineInfo | None:
    """Tell the rollout role of an engine's end; the engine as it was. None: it never registered, or the rollout role is
    gone, too, which is seen next."""
    try:
        process = process_of(lost.engine_id, spec.rollout.processes)
        return RolloutClient(read_address(spec.run_dir, process), REPORT_S).engine_lost(lost)
    except (OSError, ServiceFailed, DeadlineExceeded):
        return None


def full_disk(run_dir: Path) -> str:
    """A role that cannot write its record ends, and its log, on the same disk, may not say why."""
    free = shutil.disk_usage(run_dir).free
    return f"the disk of {run_dir} is full ({free} bytes free); make room and start it again" if free < NO_ROOM else ""


def record_restart(run_dir: Path, text: str, alone: bool = False) -> None:
    append_event(run_dir, max(0, newest_step(run_dir)), "note", RESTARTED, text, alone)


def has_cuda() -> bool:
    from slimerl.engine.launcher import Device, detect_device

    return detect_device() is Device.CUDA
