"""The rollout role is started again in place, while trainer and engines go on: it takes over from its journal.

Flows in: roles, of which it may have ended. Flows out: its new process; that is said, and counted in the record.
Invariant: where it cannot take over from what was told to others, the run starts over instead, as after the end of the
trainer, and says why.
"""

from dataclasses import replace

from slimerl.conductor.restarts import Say, full_disk, has_cuda, record_restart
from slimerl.conductor.roles import ROLLOUT
from slimerl.conductor.supervise import RoleFailed, RoleProcess
from slimerl.resilience.failure_kinds import RestartBudget
from slimerl.rollout.journal_file import JOURNAL_DIR, TAKE_OVER, has_journal
from slimerl.samples.messages import ADDRESS_FILE
from slimerl.spec import RunSpec
from slimerl.telemetry.run_log import newest_step


class RolloutRestarts:
    """Of one start of a run."""

    def __init__(self, spec: RunSpec, say: Say) -> None:
        self._spec, self._say = spec, say
        self._budget = RestartBudget(spec.resilience.rollout_restarts)
        self._last: RoleFailed | None = None
        self._last_step = -1
        """Recorded when it was last started again."""

    def replace_ended(self, roles: list[RoleProcess]) -> None:
        """Start it again if it has ended. Where the trainer has, too, nothing: that is to be told.

        Raises RoleFailed: it is not started again in place.
        """
        role = next((one for one in roles if one.role.name == ROLLOUT and one.exit_code is not None), None)
        if role is None or any(one.role.leads and one.exit_code is not None for one in roles):
            return
        failure, step = role.failure(), newest_step(self._spec.run_dir)
        refusal = full_disk(self._spec.run_dir) or self._budget.refusal(failure.kind, step + 1.0, self._impossible)
        if refusal is not None:
            raise failure.noting(f"not started again in place: {refusal}")
        role.end(0.0)
        # nobody is to call, or to register with, the one that is gone
        (self._spec.run_dir / ADDRESS_FILE).unlink(missing_ok=True)
        command = [*(each for each in role.role.command if each != TAKE_OVER), TAKE_OVER]
        roles[roles.index(role)] = RoleProcess(replace(role.role, command=command), role.log_path.parent)
        self._last, self._last_step = failure, step
        counted = f"{self._budget.used} of {self._budget.allowed}"
        text = f"{failure.summary}; started again in place, from its journal ({counted})"
        self._say(text)
        record_restart(self._spec.run_dir, text)

    def explained(self, failure: RoleFailed) -> RoleFailed:
        """What fails before a step is recorded since it was started again counts as failed with it, of its kind: an
        error of the trainer's would otherwise end a run that could start over."""
        if self._last is not None and self._not_further():
            failure.kind = self._last.kind
            return failure.noting(f"after {self._last.summary}")
        return failure

    def _impossible(self) -> str:
        if self._spec.takes_turns(has_cuda()):
            return "engines and trainer hand memory over in its holds, which end with it"
        if self._last is not None and self._not_further():
            return "it ended again before the samples of another step were taken"
        if not has_journal(self._spec.run_dir / JOURNAL_DIR):
            return "it has left no journal"
        return ""

    def _not_further(self) -> bool:
        return newest_step(self._spec.run_dir) <= self._last_step
