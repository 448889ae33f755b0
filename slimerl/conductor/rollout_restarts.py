"""A rollout role is started again in place, while trainer and engines go on: it takes over from its journal.

Flows in: roles, of which it may have ended. Flows out: its new process; that is said, and counted in the record.
Invariant: where it cannot take over from what was told to others, the run starts over instead, as after the end of the
trainer, and says why.
"""

from dataclasses import dataclass, replace

from slimerl.conductor.restarts import Say, full_disk, has_cuda, record_restart
from slimerl.conductor.roles import rollout_name
from slimerl.conductor.step import start_role
from slimerl.conductor.supervise import RoleFailed, RoleProcess
from slimerl.resilience.failure_kinds import RestartBudget
from slimerl.rollout.journal_file import TAKE_OVER, has_journal
from slimerl.rollout.journal_places import needed_to_take_over
from slimerl.samples.messages import address_file
from slimerl.spec import RunSpec
from slimerl.telemetry.run_log import newest_step


@dataclass
class _Place:
    """One rollout process, and those started in its place. `last_step`: recorded when one last was."""

    budget: RestartBudget
    last: RoleFailed | None = None
    last_step: int = -1


class RolloutRestarts:
    """Of one start of a run; each of its rollout processes by itself."""

    def __init__(self, spec: RunSpec, say: Say) -> None:
        self._spec, self._say = spec, say
        allowed = spec.resilience.rollout_restarts
        self._places = [_Place(RestartBudget(allowed)) for _ in range(spec.rollout.processes)]
        self._numbers = {rollout_name(process): process for process in range(spec.rollout.processes)}

    def replace_ended(self, roles: list[RoleProcess]) -> None:
        """Start those again that have ended. Where the trainer has, too, nothing: that is to be told.

        Raises RoleFailed: one is not started again in place.
        """
        ended = [one for one in roles if one.role.name in self._numbers and one.exit_code is not None]
        if any(one.role.leads and one.exit_code is not None for one in roles):
            return
        for role in ended:
            self._replace(roles, role, self._numbers[role.role.name])

    def _replace(self, roles: list[RoleProcess], role: RoleProcess, process: int) -> None:
        failure, step, place = role.failure(), newest_step(self._spec.run_dir), self._places[process]
        refusal = full_disk(self._spec.run_dir) or place.budget.refusal(
            failure.kind, step + 1.0, lambda: self._impossible(process)
        )
        if refusal is not None:
            raise failure.noting(f"not started again in place: {refusal}")
        role.end(0.0)
        # nobody is to call, or to register with, the one that is gone
        (self._spec.run_dir / address_file(process)).unlink(missing_ok=True)
        command = [*(each for each in role.role.command if each != TAKE_OVER), TAKE_OVER]
        roles[roles.index(role)] = start_role(replace(role.role, command=command), role.log_path.parent)
        place.last, place.last_step = failure, step
        counted = f"{place.budget.used} of {place.budget.allowed}"
        text = f"{failure.summary}; started again in place, from its journal ({counted})"
        self._say(text)
        record_restart(self._spec.run_dir, text)

    def explained(self, failure: RoleFailed) -> RoleFailed:
        """What fails before a step is recorded since one was started again counts as failed with it, of its kind: an
        error of the trainer's would otherwise end a run that could start over."""
        for place in self._places:
            if place.last is not None and self._not_further(place):
                failure.kind = place.last.kind
                return failure.noting(f"after {place.last.summary}")
        return failure

    def _impossible(self, process: int) -> str:
        place = self._places[process]
        if self._spec.takes_turns(has_cuda()):
            return "engines and trainer hand memory over in its holds, which end with it"
        if place.last is not None and self._not_further(place):
            return "it ended again before the samples of another step were taken"
        if not all(map(has_journal, needed_to_take_over(self._spec, process))):
            return "it has left no journal"
        return ""

    def _not_further(self, place: _Place) -> bool:
        return newest_step(self._spec.run_dir) <= place.last_step
