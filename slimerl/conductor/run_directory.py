"""The directory of a run: whose it is, what a run keeps in it, and what of that a new start removes.

Flows in: the spec. Flows out: the directory, held for one run alone. Invariant: what no run has made is not touched.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimerl.conductor.elastic import REQUESTS_DIR
from slimerl.resilience.heartbeat import HEARTBEATS_DIR
from slimerl.rollout.journal_file import JOURNAL_DIR
from slimerl.rollout.speculation.drafts_file import DIRECTORY as DRAFTS_DIR
from slimerl.samples.messages import ADDRESS_FILE, GATEWAY_FILE
from slimerl.spec import RunSpec
from slimerl.telemetry.perfetto import TRACE_FILE
from slimerl.telemetry.resources import RESOURCES_DIR
from slimerl.telemetry.run_log import EVENTS_FILE, METRICS_FILE, exported, newest_step, read_records
from slimerl.telemetry.trace import TRACE_DIR
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, STOP_FILE
from slimerl.training.checkpoint.local import newest_checkpoint, unusable_names

LOCK = "lock"
"""Empty file that marks a directory as a run's, locked while the run lasts."""
SPEC_FILE = "spec.yaml"
_SYNC = "sync"
"""Buckets of `sync.transport: disk`."""
LOGS_DIR = "logs"
_FILES_OF_A_START = (TRACE_FILE, ADDRESS_FILE, GATEWAY_FILE, STOP_FILE)
_OF_FURTHER_PROCESSES = ("rollout-[0-9]*.json", "gateway-[0-9]*.json")
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


def holds_other_files(run_dir: Path) -> bool:
    """Is it a directory that no run has made? Nothing of what lies there may be taken for a run's, and removed."""
    lock = run_dir / LOCK
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return False
    return lock.is_symlink() or not lock.is_file() or lock.stat().st_size > 0


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
def claimed(spec: RunSpec, fresh: bool) -> Iterator[Path]:
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
        clear(spec, goes_on=not fresh and _goes_on(run_dir))
        yield run_dir


def clear(spec: RunSpec, goes_on: bool, keeps_logs: bool = False) -> None:
    """Remove what an earlier start left, and, where the run does not go on, its record.

    Args: `keeps_logs`: they have what a role that failed a moment ago said.

    Raises RunDirectoryTaken: the run reads some of it, or it cannot be removed.
    """
    others = [path.name for pattern in _OF_FURTHER_PROCESSES for path in spec.run_dir.glob(pattern)]
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
    """Whatever lies there. A link to a directory stays, and so does a mounted file system, and what is in it goes:
    somebody wants it there."""
    if path.is_dir() and (path.is_symlink() or path.is_mount()):
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
    newest, unusable = newest_checkpoint(run_dir / CHECKPOINTS_DIR), unusable_names(run_dir / CHECKPOINTS_DIR)
    if not (run_dir / METRICS_FILE).exists() and newest is None and not unusable:
        return False
    ways = "pass --fresh to replace it, or set output_dir=…"
    if exported(read_records(run_dir / EVENTS_FILE)):
        raise RunDirectoryTaken(f"{run_dir} holds the record of an earlier run, which is finished; {ways}")
    if newest is None:
        only = f" that can be used, only {', '.join(unusable)}" if unusable else ""
        raise RunDirectoryTaken(f"{run_dir} holds the record of an earlier run, but no checkpoint of it{only}; {ways}")
    newest_step(run_dir)  # raises where the trainer could not go on with it
    return True
