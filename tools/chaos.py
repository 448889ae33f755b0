"""A real run under fire: seeded faults strike its processes and files one after the other, and it must not matter.

    python tools/chaos.py configs/quickstart.yaml --faults 20 --seed 1
    python tools/chaos.py configs/quickstart.yaml --faults 200 training.prompts_per_step=8

The run is made twice, undisturbed and under fire, in OUT/calm and OUT/fire; each fault strikes at a random moment once
the last one has been survived. Survived: the run records a step further than before, by itself, within the limit of
the kind. At the end every step is recorded once, losses and weights are those of the undisturbed run (of
rollout.max_staleness: 0, on the CPU), and no process is left. OUT/faults.jsonl has a line for each fault. Exit code 1:
something of it is not so.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.tied import tied_command
from slimerl.samples.messages import EngineState, read_address
from slimerl.spec import SpecError, load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE, newest_step
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR, complete_steps
from slimerl.training.rollout_client import RolloutClient

CHECKPOINT_STEPS = 2
FROZEN_S = 5.0
ALIVE_S = 15.0
"""`deadlines.alive_s` under fire: longer than a process is frozen that wakes up again."""
ENGINE_S, ROLE_S = 45.0, 60.0
"""Limits of recovery."""
POLL_S = 0.05
COMMAND_S = 60.0
START_S = 240.0
LEFT = ("calm", "fire", "fire.log", "faults.jsonl")
"""What a call leaves in its OUT."""
COMPARED = ("train/loss", "rollout/mean_reward", "rollout/generated_tokens")

console = Console(markup=False)


@dataclass
class Fired:
    """The run that faults strike."""

    command: list[str]
    run_dir: Path
    process: subprocess.Popen[bytes] | None = None
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    timers: list[threading.Timer] = field(default_factory=list)

    def start(self) -> None:
        with (self.run_dir.parent / f"{self.run_dir.name}.log").open("ab") as log:
            self.process = subprocess.Popen(tied_command(self.command), stdout=log, stderr=log)

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

    def ended(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def left_behind(self) -> list[str]:
        """Command lines of what was once of the run and still runs."""
        alive = [process for process in self.seen.values() if process.is_running()]
        _, alive = psutil.wait_procs(alive, timeout=10)
        return [" ".join(process.cmdline()) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


Strike = Callable[[Fired, random.Random], bool]
"""Returns whether there was something to strike."""


def killed(text: str) -> Strike:
    def strike(run: Fired, chance: random.Random) -> bool:
        return (victim := _one(run, text, chance)) is not None and _signalled(victim, signal.SIGKILL)

    return strike


def stopped(text: str) -> Strike:
    """For good: it is to be found standing still, and killed."""

    def strike(run: Fired, chance: random.Random) -> bool:
        return (victim := _one(run, text, chance)) is not None and _signalled(victim, signal.SIGSTOP)

    return strike


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
    if run.process is None or not complete_steps(run.run_dir / CHECKPOINTS_DIR):
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
    steps = complete_steps(run.run_dir / CHECKPOINTS_DIR)
    if len(steps) < 2:
        return False
    newest = run.run_dir / CHECKPOINTS_DIR / f"step-{steps[0]}"
    with suppress(FileNotFoundError):  # an older one may just be going
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    return killed(RANK)(run, chance)


def engine_exchanged(run: Fired, chance: random.Random) -> bool:
    """One is added by command; once it serves, another is removed."""
    client = RolloutClient(read_address(run.run_dir), COMMAND_S)
    added = _told("add", run).split()[-1]

    def serves() -> bool:
        _alive(run)
        return any(one.engine_id == added and one.state is EngineState.SERVING for one in client.status().engines)

    Deadline(f"{added} to serve", ENGINE_S).wait_until(serves)
    others = [one.engine_id for one in client.status().engines if one.state is EngineState.SERVING]
    _told("remove", run, chance.choice([name for name in others if name != added]))
    return True


def _told(command: str, run: Fired, *arguments: str) -> str:
    whole = [sys.executable, "-m", "slimerl.cli", "engines", command, str(run.run_dir), *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise AssertionError(f"engines {command}: {done.stderr}")
    return done.stdout.strip()


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
}
STAYING = dict.fromkeys(("rollout role killed", "rollout role stopped"), (ENGINE, SERVER, LAUNCHER))
"""By kind, processes that must live through the fault; the launcher ends with any of its ranks."""


@dataclass(frozen=True)
class Survived:
    """One fault."""

    number: int
    kind: str
    step: int
    recovery_s: float
    limit_s: float


def main(
    spec: Path,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    faults: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option()] = 0,
    steps_per_fault: Annotated[int, typer.Option(help="Raise it where the run ends before its faults.")] = 6,
    kinds: Annotated[str, typer.Option(help=f"Some of: {', '.join(KINDS)}.")] = ",".join(KINDS),
    out: Annotated[Path, typer.Option(help="An earlier one is replaced.")] = Path("runs/chaos"),
) -> None:
    """Run SPEC undisturbed and under FAULTS faults, and compare."""
    chosen = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise typer.BadParameter(f"unknown kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    try:
        load_spec(spec, overrides or ())
        emptied(out)
    except (SpecError, NotOurs) as error:
        raise typer.BadParameter(str(error)) from None
    steps = steps_per_fault * faults
    own = [f"training.steps={steps}", f"checkpoint.every_steps={CHECKPOINT_STEPS}", *(overrides or ())]
    console.print(f"undisturbed: {steps} steps", highlight=False)
    calm = subprocess.run(tied_command(_command(spec, own, out / "calm")))
    if calm.returncode:
        raise typer.Exit(calm.returncode)
    survived, problems = struck(spec, own, chosen, faults, random.Random(seed), out)
    problems += compared(out / "calm", out / "fire", steps)
    console.print(summary(survived))
    for problem in problems:
        console.print(problem, style="red", highlight=False)
    console.print(f"{len(survived)} faults survived, {len(problems)} problems", highlight=False)
    raise typer.Exit(1 if problems else 0)


class NotOurs(ValueError):
    """A directory holds what this program has not made."""


def emptied(out: Path) -> None:
    """Make OUT an empty directory. Raises NotOurs, and removes nothing: it holds what no earlier call left there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise NotOurs(f"--out {out} is no directory; choose another")
    left = sorted(out.iterdir()) if out.exists() else []
    if others := [path.name for path in left if path.name not in LEFT]:
        raise NotOurs(f"--out {out} holds {', '.join(others[:3])}, which is not of this program; choose another")
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    out.mkdir(parents=True, exist_ok=True)


def _command(spec: Path, overrides: Sequence[str], run_dir: Path) -> list[str]:
    own = [f"output_dir={run_dir}", f"training.export_path={run_dir / 'model'}"]
    return [sys.executable, "-m", "slimerl.cli", "run", str(spec), *overrides, *own]


def struck(
    spec: Path, overrides: Sequence[str], kinds: Sequence[str], faults: int, chance: random.Random, out: Path
) -> tuple[list[Survived], list[str]]:
    """Run SPEC in OUT/fire under fire; what was survived, and what went wrong."""
    budget = [f"resilience.{key}={faults + 1}" for key in ("run_restarts", "engine_restarts", "rollout_restarts")]
    budget.append(f"deadlines.alive_s={ALIVE_S}")
    run = Fired(_command(spec, [*overrides, *budget], out / "fire"), out / "fire")
    survived, problems = under_fire(run, kinds, faults, chance, out / "faults.jsonl")
    return survived, problems + [f"left behind: {each}" for each in run.left_behind()]


def under_fire(
    run: Fired, kinds: Sequence[str], faults: int, chance: random.Random, record: Path
) -> tuple[list[Survived], list[str]]:
    """Strike until the faults are used up, then let the run come to its end; what was survived, and what went wrong."""
    survived: list[Survived] = []
    run.start()
    try:
        _until(run, lambda: run.newest_step >= 0, Deadline("the run to begin", START_S))
        order = [kinds[number % len(kinds)] for number in range(faults)]
        chance.shuffle(order)
        for number, kind in enumerate(track(order, "faults", console=console)):
            if run.ended() == 0:
                raise AssertionError("the run came to its end before the faults did; raise --steps-per-fault")
            one = _survive(run, number, kind, chance)
            survived.append(one)
            with record.open("a") as file:
                file.write(json.dumps(vars(one)) + "\n")
        _until(run, lambda: False, Deadline("the run to end", START_S), may_end=True)
    except (AssertionError, DeadlineExceeded) as error:
        return survived, [f"after {len(survived)} faults: {error}"]
    finally:
        for timer in run.timers:
            timer.join()
        if run.process is not None and run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
    late = [f"{one.kind}: {one.recovery_s:.1f} s, above {one.limit_s:g} s" for one in survived if _late(one)]
    return survived, late


def _late(one: Survived) -> bool:
    return one.recovery_s > one.limit_s


def _survive(run: Fired, number: int, kind: str, chance: random.Random) -> Survived:
    strike, limit_s = KINDS[kind]
    time.sleep(chance.uniform(0.0, 2.0))
    ready = Deadline(f"something to strike by '{kind}'", START_S)
    staying = [process for text in STAYING.get(kind, ()) for process in run.find(text)]
    while not strike(run, chance):
        _alive(run)
        ready.check()
        time.sleep(POLL_S)
    begun, step = time.monotonic(), run.newest_step

    def recovered() -> bool:
        if run.newest_step > step:
            return True
        # a run that is over ends its roles before itself
        ended = [process.pid for process in staying if not process.is_running()]
        if ended and not (run.run_dir / "model").exists():
            raise AssertionError(f"'{kind}' at step {step} has ended other processes, too: {ended}")
        return False

    _until(run, recovered, Deadline(f"recovery from '{kind}' at step {step}", START_S), may_end=True)
    return Survived(number, kind, step, time.monotonic() - begun, limit_s)


def _until(run: Fired, reached: Callable[[], bool], deadline: Deadline, may_end: bool = False) -> None:
    """Raises AssertionError: the run failed; DeadlineExceeded."""
    while not reached():
        if run.ended() == 0 and may_end:
            return
        _alive(run)
        run.tree()
        deadline.check()
        time.sleep(POLL_S)


def _alive(run: Fired) -> None:
    if (code := run.ended()) is not None:
        raise AssertionError(f"the run ended with exit code {code}; see {run.run_dir}.log")


def _one(run: Fired, text: str, chance: random.Random) -> psutil.Process | None:
    found = run.find(text)
    return chance.choice(found) if found else None


def _signalled(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def compared(calm: Path, fire: Path, steps: int) -> list[str]:
    """What differs between the two runs."""
    expected, found = (read_records(each / METRICS_FILE) for each in (calm, fire))
    problems = []
    if [record["step"] for record in found] != list(range(steps + 1)):
        problems.append(f"not every step is recorded once: {[record['step'] for record in found]}")
    for name in COMPARED:
        if (of_calm := _series(expected, name)) != (of_fire := _series(found, name)):
            first = next(step for step in of_calm if of_calm[step] != of_fire.get(step))
            problems.append(f"{name} differs from step {first} on: {of_calm[first]} and {of_fire.get(first)}")
    ours, theirs = (each / "model" / "model.safetensors" for each in (fire, calm))
    if not ours.exists():
        return [*problems, f"{ours} was never written"]
    weights, reference = load_file(ours), load_file(theirs)
    if other := [name for name in reference if not weights[name].equal(reference[name])]:
        problems.append(f"weights differ: {', '.join(other[:3])} and {max(0, len(other) - 3)} more")
    return problems


def _series(records: Sequence[dict[str, Any]], name: str) -> dict[int, float]:
    return {record["step"]: record[name] for record in records if name in record}


def summary(survived: Sequence[Survived]) -> Table:
    table = Table(title="seconds until the run was further than before", title_justify="left")
    for column in ("fault", "times", "median s", "most s", "limit s"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind, (_, limit_s) in KINDS.items():
        seconds = [one.recovery_s for one in survived if one.kind == kind]
        if seconds:
            table.add_row(kind, str(len(seconds)), f"{median(seconds):.1f}", f"{max(seconds):.1f}", f"{limit_s:g}")
    return table


if __name__ == "__main__":
    typer.run(main)
