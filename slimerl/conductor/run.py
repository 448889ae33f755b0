"""One run on one machine, from spec to final table.

Flows in: a checked spec. Flows out: the run directory (`spec.yaml`, `logs/`, `metrics.jsonl`, …) and an exit.
Invariant: however the run ends (done, failed, Ctrl-C, SIGTERM), no process of it is left.
"""

import fcntl
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from slimerl.conductor.elastic import REQUESTS_DIR, ElasticEngines
from slimerl.conductor.elastic_by_load import EnginesByLoad
from slimerl.conductor.preflight.paths import LOCK, holds_other_files
from slimerl.conductor.restarts import EngineRestarts, RunRestarts
from slimerl.conductor.roles import role_commands
from slimerl.conductor.rollout_restarts import RolloutRestarts
from slimerl.conductor.stalls import Stalls
from slimerl.conductor.supervise import RoleFailed, RoleProcess, end_all, watch
from slimerl.conductor.termination import TerminationRequest
from slimerl.resilience.heartbeat import HEARTBEATS_DIR
from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.rollout.speculation.drafts_file import DIRECTORY as DRAFTS_DIR
from slimerl.samples.messages import ADDRESS_FILE, address_file
from slimerl.spec import RunSpec
from slimerl.spec.load import dump_spec
from slimerl.telemetry import trace
from slimerl.telemetry.perfetto import TRACE_FILE, TraceError, write_trace
from slimerl.telemetry.progress import ProgressView
from slimerl.telemetry.report import final_table
from slimerl.telemetry.resources import RESOURCES_DIR
from slimerl.telemetry.run_log import EVENTS_FILE, METRICS_FILE, exported, newest_step, read_records
from slimerl.telemetry.trace import TRACE_DIR
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, STOP_FILE, complete_steps, unusable_names

POLL_S = 0.2

SPEC_FILE = "spec.yaml"
_SYNC = "sync"
"""Buckets of `sync.transport: disk`."""
LOGS_DIR = "logs"
_FILES_OF_A_START = (TRACE_FILE, ADDRESS_FILE, STOP_FILE)
_DIRECTORIES_OF_A_START = (TRACE_DIR, RESOURCES_DIR, REQUESTS_DIR, HEARTBEATS_DIR, JOURNAL_DIR)
"""Mean nothing to a run that goes on: an address of a service that is gone, a request to stop that came too late,
samples of weights that no checkpoint has."""
_FILES_OF_A_RECORD = (METRICS_FILE, EVENTS_FILE)
_DIRECTORIES_OF_A_RECORD = ("tensorboard", LOGS_DIR, CHECKPOINTS_DIR, DRAFTS_DIR)
USED_NAMES = (
    LOCK,
    SPEC_FILE,
    _SYNC,
    *_FILES_OF_A_START,
    *_DIRECTORIES_OF_A_START,
    *_FILES_OF_A_RECORD,
    *_DIRECTORIES_OF_A_RECORD,
)
"""What a run itself keeps in its directory, beside the model."""


class RunDirectoryTaken(RuntimeError):
    """The run directory belongs to another run."""


def run(spec: RunSpec, console: Console, fresh: bool = False) -> None:
    """Run to the end.

    Args:
        fresh: replace the record and the checkpoints of an earlier run in the same directory; otherwise it goes on.

    Raises:
        RunDirectoryTaken: another run is using the directory, or an earlier one left a record that cannot go on.
        RecordDamaged: a line of that record is none.
        RoleFailed: a role ended early.
        KeyboardInterrupt, Terminated: asked to stop; every role has been ended. On SIGTERM the run saves first.
    """
    with _claimed(spec, fresh) as run_dir:
        spec_file = run_dir / SPEC_FILE
        spec_file.write_text(dump_spec(spec), encoding="utf-8")
        console.print(f"run {spec.name}: record in {run_dir}, logs in {run_dir / 'logs'}", soft_wrap=True, markup=False)
        trace.start(run_dir, "conductor")
        try:
            _run_until_done(spec, spec_file, run_dir, console)
        finally:
            trace.stop()
            _merge_trace(run_dir, console)
        console.print(final_table(run_dir, spec.name))


def _run_until_done(spec: RunSpec, spec_file: Path, run_dir: Path, console: Console) -> None:
    """Start over where a role ended early and that may help. Raises RoleFailed, Terminated."""

    def say(text: str) -> None:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    restarts = RunRestarts(spec, say)
    while True:
        try:
            return _run_roles(spec, spec_file, run_dir, console, Others(spec, spec_file, say))
        except RoleFailed as failure:
            from_beginning = restarts.start_over(failure)
            _clear(spec, goes_on=not from_beginning, keeps_logs=True)
            restarts.record()


class Others:
    """What becomes of engines and rollout role, and of any role that stands still, while the trainer goes on."""

    def __init__(self, spec: RunSpec, spec_file: Path, say: Callable[[str], None]) -> None:
        self._restarts, self._elastic = EngineRestarts(spec, say), ElasticEngines(spec, spec_file, say)
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
    with _claimed(spec, fresh) as run_dir:
        spec_file = run_dir / SPEC_FILE
        spec_file.write_text(dump_spec(spec), encoding="utf-8")
    return spec_file


def _run_roles(spec: RunSpec, spec_file: Path, run_dir: Path, console: Console, others: Others) -> None:
    roles: list[RoleProcess] = []
    termination = TerminationRequest(spec)
    previous = signal.signal(signal.SIGTERM, termination.arrive)
    try:
        with trace.span("start roles"):
            for command in role_commands(spec, spec_file):
                roles.append(RoleProcess(command, run_dir / LOGS_DIR))
        with trace.span("watch"), ProgressView(run_dir, spec.training.steps, console) as view:
            view.describe("starting " + ", ".join(role.role.name for role in roles))
            while not _over(roles, termination, others):
                view.update()
                time.sleep(POLL_S)
        if termination.made and not exported(read_records(run_dir / EVENTS_FILE)):
            raise termination.terminated("")
    finally:
        # A second signal must not cut the clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with trace.span("end roles"):
            end_all(roles, spec.deadlines.shutdown_s)
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _over(roles: list[RoleProcess], termination: TerminationRequest, others: Others) -> bool:
    """Raises RoleFailed, Terminated."""
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


def is_held(run_dir: Path) -> bool:
    """Does a run hold the directory now? Raises RunDirectoryTaken: its lock cannot be asked."""
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise RunDirectoryTaken(f"{run_dir / LOCK} cannot be asked whether a run holds it: {error}") from None
    return False


@contextmanager
def _claimed(spec: RunSpec, fresh: bool) -> Iterator[Path]:
    """Hold the directory for this run alone; what an earlier run left there is gone on with, or goes where `fresh`."""
    run_dir = spec.run_dir
    if holds_other_files(run_dir):
        raise RunDirectoryTaken(f"{run_dir} holds files that are no run's; set output_dir to a directory of its own")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK).open("a")
    except OSError as error:
        raise RunDirectoryTaken(f"{run_dir} cannot be the directory of a run: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryTaken(f"{run_dir} is in use by a running run; set output_dir=… to another") from None
        _clear(spec, goes_on=not fresh and _goes_on(run_dir))
        yield run_dir


def _clear(spec: RunSpec, goes_on: bool, keeps_logs: bool = False) -> None:
    """Remove what an earlier start left, and, where the run does not go on, its record.

    Args: `keeps_logs`: they have what a role that failed a moment ago said.

    Raises RunDirectoryTaken: the run reads some of it, or it cannot be removed.
    """
    others = [address_file(process) for process in range(1, spec.rollout.processes)]
    leftovers = (*_FILES_OF_A_START, *others, *_DIRECTORIES_OF_A_START)
    record = () if goes_on else (*_FILES_OF_A_RECORD, *_DIRECTORIES_OF_A_RECORD)
    doomed = [spec.run_dir / name for name in (*leftovers, *record) if not (keeps_logs and name == LOGS_DIR)]
    for key, path in spec.input_paths.items():
        if lost := next((each for each in doomed if path.resolve().is_relative_to(each.resolve())), None):
            raise RunDirectoryTaken(
                f"{key}: {path} lies in {lost}, which starting anew removes; set output_dir=… to another directory"
            )
    try:
        for path in doomed:
            _remove(path)
        (spec.run_dir / LOGS_DIR).mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirectoryTaken(f"what an earlier run left cannot be removed: {error}") from None


def _remove(path: Path) -> None:
    """Whatever lies there. A link to a directory stays, and what it leads to is emptied: somebody wants it there."""
    if path.is_symlink() and path.is_dir():
        for child in path.iterdir():
            _remove(child)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _goes_on(run_dir: Path) -> bool:
    """Has an earlier run ended early and left checkpoints? The trainer chooses among them.

    Raises:
        RunDirectoryTaken: it left a record that cannot be gone on with.
        RecordDamaged: a line of the record is none.
    """
    complete, unusable = complete_steps(run_dir / CHECKPOINTS_DIR), unusable_names(run_dir / CHECKPOINTS_DIR)
    if not (run_dir / METRICS_FILE).exists() and not complete and not unusable:
        return False
    ways = "pass --fresh to replace it, or set output_dir=…"
    if exported(read_records(run_dir / EVENTS_FILE)):
        raise RunDirectoryTaken(f"{run_dir} holds the record of an earlier run, which is finished; {ways}")
    if not complete:
        only = f" that can be used, only {', '.join(unusable)}" if unusable else ""
        raise RunDirectoryTaken(f"{run_dir} holds the record of an earlier run, but no checkpoint of it{only}; {ways}")
    newest_step(run_dir)  # raises where the trainer could not go on with it
    return True
