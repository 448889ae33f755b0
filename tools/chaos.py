"""A real run under fire: seeded faults strike its processes and files one after the other, and it must not matter.

    python tools/chaos.py configs/quickstart.yaml --faults 20 --seed 1
    python tools/chaos.py configs/quickstart.yaml --faults 200 training.prompts_per_step=8
    python tools/chaos.py configs/quickstart.yaml --faults 200 training.prompts_per_step=8 --resume    # was interrupted

The run is made twice, undisturbed and under fire, in OUT/calm and OUT/fire; each fault strikes at a random moment once
the last one has been survived. Survived: what was struck is gone, where it must go, and the run records a step further
than before, by itself, within the limit of the kind. At the end every step is recorded once, losses and weights are
those of the undisturbed run (of rollout.max_staleness: 0, on the CPU), and no process is left. OUT/faults.jsonl has a
line for each fault. Exit code 1: something of it is not so.

That the disk is full can be had where this process may mount: OUT/fire/checkpoints is a file system of its own in
memory until the end. A call that is killed leaves it mounted, and the next one with that OUT takes it up or away.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from chaos_disk import CannotMount, disk_of_checkpoints, refusal, unmount
from chaos_faults import ALIVE_S, KINDS, NEEDS_DISK, POLL_S, STAYING, Fired
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from slimerl.resilience.deadline import Deadline, DeadlineExceeded
from slimerl.resilience.tied import tied_command
from slimerl.spec import SpecError, load_spec
from slimerl.telemetry import read_records
from slimerl.telemetry.run_log import METRICS_FILE
from slimerl.training.checkpoint.directory import CHECKPOINTS_DIR

CHECKPOINT_STEPS = 2
START_S = 240.0
LEFT = ("calm", "fire", "fire.log", "faults.jsonl", "inside")
"""What a call leaves in its OUT."""
COMPARED = ("train/loss", "rollout/mean_reward", "rollout/generated_tokens")

console = Console(markup=False)


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
    kinds: Annotated[str, typer.Option(help=f"Some of: {', '.join(KINDS)}. Default: all.")] = "",
    out: Annotated[Path, typer.Option(help="An earlier one is replaced.")] = Path("runs/chaos"),
    resume: Annotated[bool, typer.Option(help="Go on with the same call's OUT, which was interrupted.")] = False,
) -> None:
    """Run SPEC undisturbed and under FAULTS faults, and compare."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        chosen, left_out = chosen_of(kinds, refusal(out))
        load_spec(spec, overrides or ())
        if not resume:
            emptied(out)
    except (NoSuchKind, SpecError, NotOurs, CannotMount) as error:
        raise typer.BadParameter(str(error)) from None
    if left_out:
        console.print(left_out, style="yellow", highlight=False)
    steps = steps_per_fault * faults
    own = [f"training.steps={steps}", f"checkpoint.every_steps={CHECKPOINT_STEPS}", *(overrides or ())]
    if not _is_over(out / "calm"):
        console.print(f"undisturbed: {steps} steps", highlight=False)
        calm = subprocess.run(tied_command(_command(spec, own, out / "calm")))
        if calm.returncode:
            raise typer.Exit(calm.returncode)
    survived, problems = struck(spec, own, order_of(chosen, faults, seed), seed, out)
    problems += compared(out / "calm", out / "fire", steps)
    console.print(summary(survived))
    for problem in problems:
        console.print(problem, style="red", highlight=False)
    console.print(f"{len(survived)} faults survived, {len(problems)} problems", highlight=False)
    raise typer.Exit(1 if problems else 0)


class NoSuchKind(ValueError):
    """A kind that was asked for is none, or cannot be had here."""


def chosen_of(kinds: str, no_disk: str) -> tuple[list[str], str]:
    """The kinds of faults, and a line on those of all that are left out.

    Args:
        kinds: with commas between them; empty: all.
        no_disk: why there can be no file system to be filled; empty: there can.

    Raises NoSuchKind.
    """
    asked = [kind.strip() for kind in kinds.split(",")] if kinds else list(KINDS)
    if unknown := [kind for kind in asked if kind not in KINDS]:
        raise NoSuchKind(f"unknown kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if not no_disk or NEEDS_DISK not in asked:
        return asked, ""
    if kinds:
        raise NoSuchKind(
            f"'{NEEDS_DISK}' cannot be had, for nothing can be mounted in --out: {no_disk}; run it as root"
        )
    asked.remove(NEEDS_DISK)
    return asked, f"left out: '{NEEDS_DISK}', for nothing can be mounted: {no_disk}"


class NotOurs(ValueError):
    """A directory holds what this program has not made."""


def emptied(out: Path) -> None:
    """Make OUT an empty directory. Raises NotOurs, and removes nothing: it holds what no earlier call left there;
    CannotMount."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise NotOurs(f"--out {out} is no directory; choose another")
    left = sorted(out.iterdir()) if out.exists() else []
    if others := [path.name for path in left if path.name not in LEFT]:
        raise NotOurs(f"--out {out} holds {', '.join(others[:3])}, which is not of this program; choose another")
    unmount(out / "fire" / CHECKPOINTS_DIR)
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    out.mkdir(parents=True, exist_ok=True)


def _command(spec: Path, overrides: Sequence[str], run_dir: Path) -> list[str]:
    own = [f"output_dir={run_dir}", f"training.export_path={run_dir / 'model'}"]
    return [sys.executable, "-m", "slimerl.cli", "run", str(spec), *overrides, *own]


def _is_over(run_dir: Path) -> bool:
    return (run_dir / "model").exists()


def order_of(kinds: Sequence[str], faults: int, seed: int) -> list[str]:
    """So many, each kind as often as the others."""
    order = [kinds[number % len(kinds)] for number in range(faults)]
    random.Random(seed).shuffle(order)
    return order


def struck(
    spec: Path, overrides: Sequence[str], order: Sequence[str], seed: int, out: Path
) -> tuple[list[Survived], list[str]]:
    """Run SPEC in OUT/fire under the faults of `order`; what was survived, and what went wrong. Those that OUT tells of
    have struck already."""
    budget = [f"resilience.{key}={len(order) + 1}" for key in ("run_restarts", "engine_restarts", "rollout_restarts")]
    budget.append(f"deadlines.alive_s={ALIVE_S}")
    run = Fired(_command(spec, [*overrides, *budget], out / "fire"), out / "fire")
    survived, problems = read_survived(out / "faults.jsonl"), []
    if len(survived) < len(order) or not _is_over(run.run_dir):
        try:
            with disk_of_checkpoints(run.run_dir) if NEEDS_DISK in order else nullcontext():
                problems = under_fire(run, order, seed, survived, out / "faults.jsonl")
        except CannotMount as error:
            problems = [f"the disk of the checkpoints: {error}"]
    late = [f"{one.kind}: {one.recovery_s:.1f} s, above {one.limit_s:g} s" for one in survived if _late(one)]
    return survived, [*problems, *late, *(f"left behind: {each}" for each in run.left_behind())]


def read_survived(record: Path) -> list[Survived]:
    """A line that was cut off is of a fault that strikes once more."""
    text = record.read_text() if record.exists() else ""
    return [Survived(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def under_fire(run: Fired, order: Sequence[str], seed: int, survived: list[Survived], record: Path) -> list[str]:
    """Strike until the faults are used up, then let the run come to its end; what went wrong. `survived` grows."""
    before = run.newest_step
    run.start()
    try:
        _until(run, lambda: run.newest_step > before, Deadline("the run to begin", START_S))
        left = range(len(survived), len(order))
        for number in track(left, "faults", console=console):
            if run.ended() == 0:
                raise AssertionError("the run came to its end before the faults did; raise --steps-per-fault")
            # of its own, so that a call that is resumed strikes as it would have
            one = _survive(run, number, order[number], random.Random(f"{seed} {number}"))
            survived.append(one)
            with record.open("a") as file:
                file.write(json.dumps(vars(one)) + "\n")
        _to_the_end(run)
    except (AssertionError, DeadlineExceeded) as error:
        return [f"after {len(survived)} faults: {error}"]
    finally:
        for timer in run.timers:
            timer.join()
        if run.process is not None and run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
    return []


def _late(one: Survived) -> bool:
    return one.recovery_s > one.limit_s


def _survive(run: Fired, number: int, kind: str, chance: random.Random) -> Survived:
    strike, limit_s = KINDS[kind]
    time.sleep(chance.uniform(0.0, 2.0))
    ready = Deadline(f"something to strike by '{kind}'", START_S)
    staying = [process for text in STAYING.get(kind, ()) for process in run.find(text)]
    run.victim = None
    while not strike(run, chance):
        run.check_alive()
        ready.check()
        time.sleep(POLL_S)
    begun, step = time.monotonic(), run.newest_step

    def recovered() -> bool:
        nonlocal step
        if run.victim_remains():
            step = run.newest_step
            return False
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
        run.check_alive()
        run.tree()
        deadline.check()
        time.sleep(POLL_S)


def _to_the_end(run: Fired) -> None:
    """Many steps may be left. Raises as `_until`."""
    while run.ended() != 0:
        step = run.newest_step
        further = Deadline(f"a step after {step}, or the end of the run", START_S)
        _until(run, partial(_is_past, run, step), further, may_end=True)


def _is_past(run: Fired, step: int) -> bool:
    return run.newest_step > step


def compared(calm: Path, fire: Path, steps: int) -> list[str]:
    """What differs between the two runs."""
    expected, found = (read_records(each / METRICS_FILE) for each in (calm, fire))
    problems = []
    if (recorded := steps_of(found)) != list(range(steps + 1)):
        problems.append(f"not every step is recorded once: {recorded}")
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


def steps_of(records: Sequence[dict[str, Any]]) -> list[int]:
    """As recorded; an evaluation in the background has a record of its own beside that of its step."""
    apart = [all(name in ("step", "time") or name.startswith("eval/") for name in record) for record in records]
    whole = {record["step"] for record, alone in zip(records, apart, strict=True) if not alone}
    return [
        record["step"] for record, alone in zip(records, apart, strict=True) if not alone or record["step"] not in whole
    ]


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
