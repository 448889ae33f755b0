"""Two clocks of a process, for whoever must tell a hang from work: it is alive, and it gets on.

Flows in: `enter` and `beat` from the code that works. Flows out: RUN_DIR/heartbeats/NAME, one line of fixed width that
a thread of its own rewrites in place once a second, as long as the process is scheduled at all and its interpreter
turns:
    {"pid", "beat", "phase", "late_s"}
`beat` grows with every line; `late_s`: seconds since the process should have got on, negative while there is time.
Where a rank monitor stands beside the process (`rank_monitor.py`), that thread tells it, too, as long as there is time,
and is the one to show the stacks when there is none left.

On `STACKS_SIGNAL` a process that has a heartbeat writes the stacks of all its threads to its standard error: also from
within a collective, for no bytecode of Python has to run for it.

A process has one heartbeat, as it has one trace: `start` opens it, and until then every call here does nothing. A
disk that cannot be written ends the heartbeat with a warning, and never the process.
"""

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slimerl.resilience import rank_monitor

logger = logging.getLogger(__name__)

HEARTBEATS_DIR = "heartbeats"
PERIOD_S = 1.0
STACKS_SIGNAL = signal.SIGUSR2
"""SIGUSR1 is SLURM's here, and asks a job to end."""

_SHOWN_BEATS = 10
_WIDTH = 256
_PHASE_CHARACTERS = 80


@dataclass(frozen=True)
class Pulse:
    """What one process last wrote."""

    name: str
    pid: int
    beat: int
    phase: str
    late_s: float


class Heartbeat:
    """See the module. `limits_s`: how long a phase may take without a beat, `default_s` where it is not named."""

    def __init__(self, path: Path, limits_s: Mapping[str, float], default_s: float) -> None:
        self._limits_s, self._default_s = limits_s, default_s
        self._pid = os.getpid()
        self._beats = 0
        self._ended = threading.Event()
        self.enter("start")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._monitor = rank_monitor.connect()
        self._shown = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """The process begins something else."""
        self._phase, self._limit_s = phase, self._limits_s.get(phase, self._default_s)
        self.beat()

    def beat(self) -> None:
        """It has got on. Costs a reading of the clock."""
        self._promised_s = time.monotonic() + self._limit_s

    def close(self) -> None:
        """Nobody is to expect anything of this process any more."""
        self._ended.set()
        if os.getpid() == self._pid:
            self._thread.join(PERIOD_S)
            self._end_monitoring()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self._write()
        except OSError as error:
            logger.warning("%s cannot be written; nobody will notice a hang of this process: %s", self._path, error)
            self._path.unlink(missing_ok=True)
            self._end_monitoring()
        finally:
            os.close(self._file)

    def _write(self) -> None:
        """In place, so that a full disk is no obstacle once the file is there."""
        self._beats += 1
        phase = self._phase[:_PHASE_CHARACTERS]
        late_s = round(time.monotonic() - self._promised_s, 3)
        record = {"pid": self._pid, "beat": self._beats, "phase": phase, "late_s": late_s}
        os.pwrite(self._file, json.dumps(record).ljust(_WIDTH - 1).encode()[: _WIDTH - 1] + b"\n", 0)
        if self._beats % _SHOWN_BEATS == 0:
            # a network file system shows other machines what was written once the file is closed
            again = os.open(self._path, os.O_WRONLY)
            os.close(self._file)
            self._file = again
        if self._monitor is not None:
            self._tell(self._monitor, late_s)

    def _tell(self, monitor: rank_monitor.RankMonitor, late_s: float) -> None:
        """A monitor kills without a word to the process: its stacks are shown as soon as it is late."""
        if late_s <= 0:
            self._shown = False
            monitor.tell()
        elif not self._shown:
            self._shown = True
            logger.error("process %d does not get on in '%s'; its threads:", self._pid, self._phase)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

    def _end_monitoring(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


def read_pulses(run_dir: Path) -> list[Pulse]:
    """Of all processes that have a heartbeat. One that is just being written is left out: it comes with the next
    look."""
    found = []
    for path in sorted((run_dir / HEARTBEATS_DIR).glob("*")):
        try:
            found.append(Pulse(name=path.name, **json.loads(path.read_bytes())))
        except (OSError, ValueError, TypeError):
            continue
    return found


_current: Heartbeat | None = None


def start(run_dir: Path, name: str, limits_s: Mapping[str, float], default_s: float) -> None:
    """Open this process's heartbeat. Where it cannot be opened, a warning says so and there is none."""
    global _current
    stop()
    show_stacks_on_signal()
    try:
        _current = Heartbeat(run_dir / HEARTBEATS_DIR / name, limits_s, default_s)
    except OSError as error:
        logger.warning("nobody will notice a hang of %s: %s", name, error)


def stop() -> None:
    """Close it; further calls do nothing."""
    global _current
    if _current is not None:
        _current.close()
    _current = None


def enter(phase: str) -> None:
    """See `Heartbeat.enter`."""
    if _current is not None:
        _current.enter(phase)


def beat() -> None:
    """See `Heartbeat.beat`."""
    if _current is not None:
        _current.beat()


def start_of_loop(run_dir: Path, name: str, stall_s: float) -> "asyncio.Task[None]":
    """`start`, for a process that is an event loop: it gets on as long as the loop turns. Ends with the task, which is
    to be cancelled."""

    async def turn() -> None:
        try:
            while True:
                beat()
                await asyncio.sleep(PERIOD_S)
        finally:
            stop()

    start(run_dir, name, {}, stall_s)
    enter("event loop")
    return asyncio.create_task(turn())


def show_stacks_on_signal() -> None:
    """From now on `STACKS_SIGNAL` writes the stacks of all threads to standard error, and nothing else happens."""
    faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__ or 2, all_threads=True)
