"""One run on one machine, or on the nodes of a job of SLURM, from spec to final table.

Flows in: a checked spec. Flows out: the run directory (`spec.yaml`, `logs/`, `metrics.jsonl`, …) and an exit.
Invariant: however the run ends (done, failed, Ctrl-C, SIGTERM), no process of it is left.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from slimerl.conductor.elastic import ElasticEngines
from slimerl.conductor.elastic_by_load import EnginesByLoad
from slimerl.conductor.restarts import EngineRestarts, RunRestarts
from slimerl.conductor.roles import Roles
from slimerl.conductor.rollout_restarts import RolloutRestarts
from slimerl.conductor.run_directory import LOGS_DIR, SPEC_FILE, claimed, clear
from slimerl.conductor.slurm import Job, RolesOfJob
from slimerl.conductor.stalls import Stalls
from slimerl.conductor.step import start_role
from slimerl.conductor.supervise import RoleFailed, RoleProcess, end_all, watch
from slimerl.conductor.termination import TerminationRequest, WhileRolesEnd
from slimerl.spec import RunSpec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import trace
from slimerl.telemetry.perfetto import TRACE_FILE, TraceError, write_trace
from slimerl.telemetry.progress import ProgressView
from slimerl.telemetry.report import final_table
from slimerl.telemetry.run_log import EVENTS_FILE, exported, read_records

POLL_S = 0.2


def run(spec: RunSpec, console: Console, fresh: bool = False, job: Job | None = None) -> None:
    """Run to the end.

    Args:
        fresh: replace the record and the checkpoints of an earlier run in the same directory; otherwise it goes on.
        job: whose nodes have the roles; None: this machine has.

    Raises:
        RunDirectoryTaken: another run is using the directory, or an earlier one left a record that cannot go on.
        RecordDamaged: a line of that record is none.
        RoleFailed: a role ended early.
        KeyboardInterrupt, Terminated: asked to stop; every role has been ended. On SIGTERM the run saves first.
    """
    with claimed(spec, fresh) as run_dir:
        spec_file = run_dir / SPEC_FILE
        spec_file.write_text(dump_spec(spec), encoding="utf-8")
        console.print(f"run {spec.name}: record in {run_dir}, logs in {run_dir / 'logs'}", soft_wrap=True, markup=False)
        trace.start(run_dir, "conductor")
        try:
            commands = Roles(spec, spec_file) if job is None else RolesOfJob(spec, spec_file, job)
            _run_until_done(spec, commands, run_dir, console)
        finally:
            trace.stop()
            _merge_trace(run_dir, console)
        console.print(final_table(run_dir, spec.name))


def _run_until_done(spec: RunSpec, commands: Roles, run_dir: Path, console: Console) -> None:
    """Start over where a role ended early and that may help. Raises RoleFailed, Terminated."""

    def say(text: str) -> None:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    restarts, termination, ending = RunRestarts(spec, say), TerminationRequest(spec), WhileRolesEnd(spec)
    while True:
        try:
            return _run_roles(commands, run_dir, console, Others(commands, say), termination, ending)
        except RoleFailed as failure:
            ending.obey()
            termination.notice()
            from_beginning = restarts.start_over(failure)
            clear(spec, goes_on=not from_beginning, keeps_logs=True)
            termination.repeat()
            restarts.record()


class Others:
    """What becomes of engines and rollout role, and of any role that stands still, while the trainer goes on."""

    def __init__(self, commands: Roles, say: Callable[[str], None]) -> None:
        spec = commands.spec
        self._restarts, self._elastic = EngineRestarts(spec, say), ElasticEngines(commands, say)
        self._rollout = RolloutRestarts(spec, say)
        self._by_load = EnginesByLoad(spec, self._elastic, say)
        self._stalls = Stalls(spec.run_dir, spec.deadlines.alive_s)

    def look_after(self, roles: list[RoleProcess]) -> None:
        """Raises RoleFailed."""
        self._stalls.end_stalled(roles)
        self._elastic.serve(roles)
        self._rollout.replace_ended(roles)
        self._by_load.look(roles)
        self._restarts.replace_ended(roles)

    def explained(self, failure: RoleFailed) -> RoleFailed:
        """As a consequence of what ended before."""
        return self._rollout.explained(failure)


def prepare(spec: RunSpec, fresh: bool = False) -> Path:
    """What `run` does before it starts roles, for a launcher that starts them by itself; returns the file they read.

    Raises:
        RunDirectoryTaken, RecordDamaged: as `run`.
    """
    with claimed(spec, fresh) as run_dir:
        spec_file = run_dir / SPEC_FILE
        spec_file.write_text(dump_spec(spec), encoding="utf-8")
    return spec_file


def _run_roles(
    commands: Roles,
    run_dir: Path,
    console: Console,
    others: Others,
    termination: TerminationRequest,
    ending: WhileRolesEnd,
) -> None:
    spec, roles = commands.spec, list[RoleProcess]()
    signal.signal(signal.SIGTERM, termination.arrive)
    signal.signal(signal.SIGUSR1, termination.save)
    try:
        with trace.span("start roles"):
            for command in commands.all():
                roles.append(start_role(command, run_dir / LOGS_DIR))
        with trace.span("watch"), ProgressView(run_dir, spec.training.steps, console) as view:
            view.describe("starting " + ", ".join(role.role.name for role in roles))
            while not _over(roles, termination, others):
                view.update()
                time.sleep(POLL_S)
        if (termination.made or termination.saves) and not exported(read_records(run_dir / EVENTS_FILE)):
            raise termination.terminated("")
    finally:
        with ending, trace.span("end roles"):
            end_all(roles, spec.deadlines.shutdown_s)


def _over(roles: list[RoleProcess], termination: TerminationRequest, others: Others) -> bool:
    """Raises RoleFailed, Terminated."""
    termination.notice()
    termination.check()
    try:
        if not termination.made:
            others.look_after(roles)
        return watch(roles)
    except RoleFailed as failure:
        if termination.made:
            raise termination.terminated(str(failure)) from None
        raise others.explained(failure) from None


def _merge_trace(run_dir: Path, console: Console) -> None:
    """A trace that cannot be written must not hide how the run ended."""
    try:
        write_trace(run_dir)
    except (TraceError, OSError) as error:
        console.print(f"no {TRACE_FILE}: {error}", style="yellow", markup=False, soft_wrap=True)
