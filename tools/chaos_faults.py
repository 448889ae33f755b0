"""What tools/chaos.py strikes a run with, and the run as it is struck.

Flows in: a run's command. Flows out: processes killed, stopped and frozen, files truncated, engines exchanged, a full
disk, and what roles do to themselves (`chaos_inside/sitecustomize.py`).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_disk import fill, give_back

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.tied import tied_command
from slimerl.samples.messages import EngineState, read_address
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE, newest_step
from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, complete_steps
from slimerl.training.rollout_client import RolloutClient, ServiceFailed

FROZEN_S = 5.0
ALIVE_S = 15.0
"""`deadlines.alive_s` under fire: longer than a process is frozen that wakes up again."""
ENGINE_S, ROLE_S = 45.0, 60.0
"""Limits of recovery."""
STEPS_S = 240.0
"""Of some steps, with the checkpoints in them."""
POLL_S = 0.05
COMMAND_S = 60.0
INSIDE = Path(__file__).parent / "chaos_inside"


@dataclass
class Fired:
    """The run that faults strike."""

    command: list[str]
    run_dir: Path
    process: subprocess.Popen[bytes] | None = None
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    victim: psutil.Process | None = None
    """Of the present fault, where it is one that must end."""
    timers: list[threading.Timer] = field(default_factory=list)

    @property
    def inside(self) -> Path:
        """Where faults appear that the run commits by itself."""
        return self.run_dir.parent / "inside"

    def start(self) -> None:
        self.inside.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "SLIMERL_CHAOS": str(self.inside)}
        with (self.run_dir.parent / f"{self.run_dir.name}.log").open("ab") as log:
            self.process = subprocess.Popen(tied_command(self.command), stdout=log, stderr=log, env=environment)

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            conductor = psutil.Process(self.process.pid)
            alive = [conductor, *conductor.children(recursive=True)]
            self.seen.update((process.pid, process) for process in alive)
            return alive
        return []

    def find(self, text: str) -> list[psutil.Process]:
        found = []
        for process in self.tree():
            with suppress(psutil.Error):
                if text in " ".join([process.name(), *process.cmdline()]) + " ":
                    found.append(process)
        return found

    @property
    def newest_step(self) -> int:
        return newest_step(self.run_dir)

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / CHECKPOINTS_DIR

    def has_told(self, figure: str, after: int) -> bool:
        """In the record of a step behind `after`."""
        return any(figure in record for record in read_records(self.run_dir / METRICS_FILE) if record["step"] > after)

    def wait_until(self, reached: Callable[[], bool], what: str, limit_s: float) -> None:
        """Raises AssertionError: the run has ended; DeadlineExceeded."""
        deadline = Deadline(what, limit_s)
        while not reached():
            self.check_alive()
            self.tree()
            deadline.check()
            time.sleep(POLL_S)

    def ended(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def victim_remains(self) -> bool:
        """Until it is gone, steps say nothing: those may come that were begun without it."""
        with suppress(psutil.NoSuchProcess):
            return self.victim is not None and self.victim.status() != psutil.STATUS_ZOMBIE
        return False

    def check_alive(self) -> None:
        """Raises AssertionError: the run has ended."""
        if (code := self.ended()) is not None:
            raise AssertionError(f"the run ended with exit code {code}; see {self.run_dir}.log")

    def left_behind(self) -> list[str]:
        """Command lines of what was once of the run and still runs."""
        alive = [process for process in self.seen.values() if process.is_running()]
        _, alive = psutil.wait_procs(alive, timeout=10)
        return [" ".join(process.cmdline()) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


Strike = Callable[[Fired, random.Random], bool]
"""Returns whether there was something to strike."""


def killed(text: str, by: signal.Signals = signal.SIGKILL) -> Strike:
    def strike(run: Fired, chance: random.Random) -> bool:
        run.victim = _one(run, text, chance)
        return run.victim is not None and _signalled(run.victim, by)

    return strike


def stopped(text: str) -> Strike:
    """For good: it is to be found standing still, and killed."""
    return killed(text, signal.SIGSTOP)


def frozen(text: str) -> Strike:
    """For a while."""

    def strike(run: Fired, chance: random.Random) -> bool:
        victim = _one(run, text, chance)
        if victim is None or not _signalled(victim, signal.SIGSTOP):
            return False
        timer = threading.Timer(FROZEN_S, _signalled, (victim, signal.SIGCONT))
        timer.start()
        run.timers.append(timer)
        return True

    return strike


def conductor_killed(run: Fired, chance: random.Random) -> bool:
    """Everything goes with it; the same command goes on."""
    if run.process is None or not complete_steps(run.checkpoints):
        return False
    run.tree()
    run.process.kill()
    run.process.wait()
    if left := run.left_behind():
        raise AssertionError(f"the conductor was killed, and still there are: {left}")
    run.start()
    return True


def checkpoint_truncated(run: Fired, chance: random.Random) -> bool:
    """The largest file of the newest checkpoint, and a trainer rank is killed: the checkpoint before it has to do."""
    steps = complete_steps(run.checkpoints)
    if len(steps) < 2:
        return False
    newest = directory.complete_path(run.checkpoints, steps[0])
    with suppress(FileNotFoundError):  # an older one may just be going
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    return killed(RANK)(run, chance)


def committed(name: str) -> Strike:
    """By a trainer rank."""

    def strike(run: Fired, chance: random.Random) -> bool:
        _commit(run, name)
        return True

    return strike


def _commit(run: Fired, name: str) -> None:
    """The run does it to itself, as soon as it can."""
    fault = run.inside / name
    fault.touch()
    run.wait_until(lambda: not fault.exists(), f"the run to commit '{name}'", ROLE_S)


def engine_answers_garbage(run: Fired, chance: random.Random) -> bool:
    """Of every form, each to another request; the run tells that it has asked again."""
    step = run.newest_step
    for form in chance.sample(GARBAGE, len(GARBAGE)):
        _commit(run, form)
    run.wait_until(lambda: run.has_told(TRIED_AGAIN, step), "garbage to be told of in the record", STEPS_S)
    return True


def disk_full(run: Fired, chance: random.Random) -> bool:
    """That of the checkpoints, until a save has failed and the run has told so. What was complete stays; once there is
    space again, so is a further one."""
    good, step = _newest(run), run.newest_step
    if not good:
        return False

    def has_failed() -> bool:
        # again: a save that was under way may end well, and an older checkpoint then gives its space back
        fill(run.checkpoints)
        return run.has_told(FAILED, step)

    try:
        run.wait_until(has_failed, "a save to fail for want of space", STEPS_S)
        left = _newest(run)
        broken = _faults(directory.complete_path(run.checkpoints, left)) if left >= good else ["it is gone"]
    finally:
        give_back(run.checkpoints)
    if broken:
        raise AssertionError(f"a full disk has cost the checkpoint of step {good}: {directory.described(broken)}")
    run.wait_until(
        lambda: _newest(run) > left, f"a checkpoint after step {left}, with space on the disk again", STEPS_S
    )
    return True


def _newest(run: Fired) -> int:
    """0: there is none."""
    return next(iter(complete_steps(run.checkpoints)), 0)


def _faults(checkpoint: Path) -> list[str]:
    try:
        return directory.faults(checkpoint, directory.read_manifest(checkpoint).files)
    except directory.Damaged as error:
        return [str(error)]


def engine_exchanged(run: Fired, chance: random.Random) -> bool:
    """One is added by command; once it serves, another is removed. Again where the run has started over meanwhile, with
    the engines of its spec."""
    launcher = run.find(LAUNCHER)
    added = _told("add", run).split()[-1]
    deadline = Deadline(f"{added} to serve", ENGINE_S)
    while added not in (serving := _serving(run)):
        run.check_alive()
        deadline.check()
        if run.find(LAUNCHER) != launcher:
            return False
        time.sleep(POLL_S)
    _told("remove", run, chance.choice([name for name in serving if name != added]))
    return True


def _serving(run: Fired) -> list[str]:
    """None where the rollout role is just replaced."""
    with suppress(OSError, ServiceFailed, DeadlineExceeded):
        client = RolloutClient(read_address(run.run_dir), COMMAND_S)
        return [one.engine_id for one in client.status().engines if one.state is EngineState.SERVING]
    return []


def _one(run: Fired, text: str, chance: random.Random) -> psutil.Process | None:
    found = run.find(text)
    return chance.choice(found) if found else None


def _signalled(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def _told(command: str, run: Fired, *arguments: str) -> str:
    whole = [sys.executable, "-m", "slimerl.cli", "engines", command, str(run.run_dir), *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise AssertionError(f"engines {command}: {done.stderr}")
    return done.stdout.strip()


FAILED, TRIED_AGAIN = "checkpoint/failed", "rollout/tried_again_bad_answer"
GARBAGE = ("no-json", "cut-off", "no-token", "no-logprob")
ENGINE, SERVER, ROLLOUT = "-m slimerl.engine ", "sglang::scheduler", "-m slimerl.rollout "
RANK, LAUNCHER = "-u -m slimerl.training ", "torch.distributed.run "
KINDS: dict[str, tuple[Strike, float]] = {
    "engine role killed": (killed(ENGINE), ENGINE_S),
    "engine's scheduler killed": (killed(SERVER), ENGINE_S),
    "engine's scheduler frozen": (frozen(SERVER), ENGINE_S),
    "rollout role killed": (killed(ROLLOUT), ROLE_S),
    "rollout role frozen": (frozen(ROLLOUT), ROLE_S),
    "engine's scheduler stopped": (stopped(SERVER), ALIVE_S + ENGINE_S),
    "rollout role stopped": (stopped(ROLLOUT), ALIVE_S + ROLE_S),
    "trainer rank stopped": (stopped(RANK), ALIVE_S + ROLE_S),
    "launcher stopped": (stopped(LAUNCHER), ALIVE_S + ROLE_S),
    "trainer rank killed": (killed(RANK), ROLE_S),
    "trainer rank frozen": (frozen(RANK), ROLE_S),
    "launcher killed": (killed(LAUNCHER), ROLE_S),
    "conductor killed": (conductor_killed, ROLE_S),
    "checkpoint truncated": (checkpoint_truncated, ROLE_S),
    "engine exchanged": (engine_exchanged, ENGINE_S),
    "connection dropped": (committed("dropped"), ROLE_S),
    "answer delayed": (committed("delayed"), ROLE_S),
    "gradient no number": (committed("spoilt"), ROLE_S),
    "garbage from an engine": (engine_answers_garbage, ROLE_S),
    "disk full": (disk_full, ROLE_S),
}
NEEDS_DISK = "disk full"
STAYING: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("rollout role killed", "rollout role stopped"), (ENGINE, SERVER, LAUNCHER)
)
STAYING |= dict.fromkeys(("garbage from an engine", NEEDS_DISK), (ENGINE, SERVER, LAUNCHER, ROLLOUT))
"""By kind, processes that must live through the fault; the launcher ends with any of its ranks."""
