"""The command line: `slimerl run`, `slimerl check`, `slimerl doctor`, and the roles one by one."""

import os
import signal
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from slimerl.resilience.imports import without_collections
from slimerl.spec import RunSpec, SpecError, load_spec

if TYPE_CHECKING:
    from slimerl.conductor.slurm import Job

app = typer.Typer(
    help="""Reinforcement learning of large language models: megatron-core trains, SGLang generates.

\b
slimerl doctor                             what this machine can run
slimerl check configs/quickstart.yaml      what a run will do, or why not
slimerl run configs/quickstart.yaml        run it
slimerl run my.yaml training.steps=5       with another value
""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

engines_app = typer.Typer(help="Engines of a run that goes on: list, add, remove.", no_args_is_help=True)
app.add_typer(engines_app, name="engines")

spec_app = typer.Typer(help="Values of a run spec.", no_args_is_help=True)
app.add_typer(spec_app, name="spec")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file; examples in configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override keys of the spec, e.g. training.parallel.tensor=2"),
]


ENGINES_S = 30.0
"""For rollout role or conductor to answer."""

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="E.g. runs/quickstart.")]


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace an earlier run, not go on with it.")] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="In the script of a job of SLURM: on the nodes of the job.")
    ] = False,
) -> None:
    """Start every role of SPEC on this machine, watch them, and print the result.

    Exit code 0: the run finished; 1: it failed (the reason is printed); 2: the spec cannot be used;
    130: interrupted; 143: terminated. On SIGTERM it saves a checkpoint at the end of its step and ends, within
    deadlines.terminate_s; on a second SIGTERM, and on Ctrl-C, it ends at once. SIGUSR1 is SIGTERM without a limit.

    \b
    Examples:
      slimerl run configs/quickstart.yaml
      slimerl run configs/quickstart.yaml --fresh training.steps=5
      slimerl run my.yaml output_dir=/big/my-run engine.replicas=2
    """
    from slimerl.conductor.run import run as conduct
    from slimerl.conductor.run_directory import RunDirectoryTaken
    from slimerl.conductor.supervise import RoleFailed
    from slimerl.conductor.termination import Terminated
    from slimerl.telemetry.run_log import RecordDamaged

    checked = _loaded(spec, overrides) if slurm else _checked(spec, overrides)
    job = _job(checked) if slurm else None
    try:
        conduct(checked, Console(markup=False), fresh, job)
    except (RunDirectoryTaken, RecordDamaged) as error:
        _fail(str(error), 2)
    except RoleFailed as error:
        _fail(f"run {checked.name} failed: {error}", 1)
    except KeyboardInterrupt:
        _fail(f"run {checked.name} interrupted; every role has ended", 130)
    except Terminated as saved:
        _fail(f"run {checked.name} terminated; every role has ended; {saved}", 143)
    finally:
        # A job's script sends it until this process has ended; Python gives signals their defaults back before.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@app.command()
def check(
    spec: SpecFile,
    overrides: Overrides = None,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only",
            help="For a cluster: without files, data and GPUs; the model's config.json is models/NAME.json beside "
            "SPEC, NAME being the last part of model.path.",
        ),
    ] = False,
) -> None:
    """Check SPEC against this machine and its files, and print what follows from it. Nothing is started or written.

    Exit code 0: it can run; 2: it cannot, and every reason has a line that says what to do.

    \b
    Examples:
      slimerl check configs/quickstart.yaml
      slimerl check my.yaml training.parallel.pipeline=2 engine.replicas=4
      slimerl check configs/deepseek_v3_671b.yaml --plan-only
    """
    if plan_only:
        with without_collections():
            from slimerl.conductor.plan_only import PlanFaults, planned_table

        try:
            Console(markup=False).print(planned_table(_loaded(spec, overrides), spec.parent))
        except PlanFaults as error:
            _fail(str(error), 2)
        return
    from slimerl.conductor.derived import derived_table

    Console(markup=False).print(derived_table(_checked(spec, overrides)))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs: the findings as JSON.")] = False,
) -> None:
    """Report what this machine can run, what is missing, what that means and how to mend it.

    Exit code 0: the quickstart can run here; 1: it cannot.

    \b
    Examples:
      slimerl doctor
      slimerl doctor --json | python -m json.tool
    """
    from slimerl.conductor import doctor as machine

    findings = machine.examine(Path.cwd())
    if as_json:
        typer.echo(machine.as_json(findings))
    else:
        machine.report(findings, Console(markup=False))
    raise typer.Exit(0 if machine.can_run_quickstart(findings) else 1)


@app.command()
def engine(
    spec: SpecFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(help="Which of the spec's engine.replicas this is.")] = 0,
    node: Annotated[int, typer.Option(help="Which of the engine's machines this is.")] = 0,
    head: Annotated[str, typer.Option(help="Address of the first of them, where there are several.")] = "",
) -> None:
    """Run one engine role: an SGLang server that registers with the rollout role.

    `slimerl run` starts it; by hand it waits for the rollout role of the same SPEC.

    \b
    Example:
      slimerl engine runs/my-run/spec.yaml --index 1
    """
    from slimerl.engine.__main__ import main

    place = ["--index", str(index), "--node", str(node), *(["--head", head] if head else [])]
    raise typer.Exit(main([str(spec), *(overrides or ()), *place]))


@app.command()
def rollout(
    spec: SpecFile,
    overrides: Overrides = None,
    process: Annotated[
        int, typer.Option(min=0, help="Its number, where rollout.processes says there are several.")
    ] = 0,
) -> None:
    """Run the rollout role: prompts, scheduling, rewards, sample store and control service.

    `slimerl run` starts it; by hand start the engines and the trainer beside it, with the same SPEC.

    \b
    Example:
      slimerl rollout runs/my-run/spec.yaml
      torchrun --standalone --nproc-per-node 2 -m slimerl.training runs/my-run/spec.yaml
    """
    from slimerl.rollout.__main__ import main

    loaded = _loaded(spec, overrides)
    if process >= loaded.rollout.processes:
        _fail(f"there is no rollout process {process}: rollout.processes = {loaded.rollout.processes}", 2)
    raise typer.Exit(main(loaded, process))


@app.command()
def prepare(
    spec: SpecFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace an earlier run, not go on with it.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Trainer and engines get nodes as cluster.… says; can they work together?")
    ] = False,
) -> None:
    """Make the run directory of SPEC ready for roles that are started one by one, and print the file that they read.

    Exit code 0: ready, or an earlier run that ended early goes on; 2: the spec cannot be used, or the directory is
    taken. `slimerl run` does this by itself.

    \b
    Example:
      slimerl prepare configs/quickstart.yaml
    """
    from slimerl.conductor.reach import reach_faults, unwatched_faults
    from slimerl.conductor.run import prepare as make_ready
    from slimerl.conductor.run_directory import RunDirectoryTaken
    from slimerl.telemetry.run_log import RecordDamaged

    loaded = _loaded(spec, overrides)
    nodes = loaded.trainer_nodes + loaded.engine_nodes
    if faults := list(reach_faults(loaded, nodes) if cluster else unwatched_faults(loaded)):
        _fail("\n".join(faults), 2)
    try:
        typer.echo(make_ready(loaded, fresh))
    except (RunDirectoryTaken, RecordDamaged) as error:
        _fail(str(error), 2)


@spec_app.command("get")
def spec_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="E.g. engine.replicas, or derived: trainer_nodes.")],
    spec: SpecFile,
    overrides: Overrides = None,
) -> None:
    """Print one value of SPEC for a script: a key, or what follows from the keys.

    \b
    Examples:
      slimerl spec get training.parallel.world_size configs/quickstart.yaml
      slimerl spec get trainer_nodes configs/deepseek_v3_671b.yaml
    """
    from slimerl.spec.lookup import value_text

    try:
        typer.echo(value_text(_loaded(spec, overrides), name))
    except SpecError as error:
        _fail(str(error), 2)


@app.command()
def stop(run_dir: RunDirectory) -> None:
    """Ask the run of RUN_DIR to save a checkpoint at the end of its step, and to end. Started again, it goes on there.
    With algorithm.reference_refresh_steps it ends at the next step that refreshes the reference model.

    Exit code 0: it is asked to, and is asked again where it starts over; if its checkpoint fails all the same, the run
    itself ends with an error. 2: RUN_DIR is no run's directory, no run holds it now, or the run keeps no checkpoints.
    """
    from slimerl.conductor.run_directory import SPEC_FILE
    from slimerl.training.checkpoint.directory import STOP_FILE

    spec_file = run_dir / SPEC_FILE
    if not spec_file.is_file():
        _fail(f"{run_dir} is no run's directory: it has no spec.yaml", 2)
    if not _loaded(spec_file, None).checkpoint.every_steps:
        _fail(f"the run of {run_dir} keeps no checkpoints (checkpoint.every_steps = 0); end it with Ctrl-C", 2)
    if not _held(run_dir):
        _fail(
            f"no run holds {run_dir}/lock: there is nothing to stop. Roles that were started one by one, or on a file "
            f"system that does not carry locks between machines, are asked by: touch {run_dir / STOP_FILE}",
            2,
        )
    (run_dir / STOP_FILE).touch()


@engines_app.command("list")
def list_engines(run_dir: RunDirectory) -> None:
    """Print each engine of the run of RUN_DIR with its state and the version that it holds."""
    from slimerl.resilience.deadline import DeadlineExceeded
    from slimerl.samples.messages import ADDRESS_FILE, address_file, read_address
    from slimerl.training.rollout_client import RolloutClient, ServiceFailed

    others = takewhile(lambda process: (run_dir / address_file(process)).exists(), count(1))
    try:
        found = [RolloutClient(read_address(run_dir, each), ENGINES_S).status() for each in (0, *others)]
    except (OSError, ServiceFailed, DeadlineExceeded) as error:
        _fail(f"no rollout role answers for {run_dir} ({run_dir / ADDRESS_FILE}): {error}", 2)
    for engine in (engine for status in found for engine in status.engines):
        typer.echo(f"{engine.engine_id}  {engine.state}  version {engine.version}  {engine.url}")


@engines_app.command("add")
def add_engines(run_dir: RunDirectory, count: Annotated[int, typer.Option(min=1, max=10_000)] = 1) -> None:
    """Start COUNT more engines in the run of RUN_DIR, which `slimerl run` runs; they serve after a weight sync."""
    _ask_for_engines(run_dir, add=count)


@engines_app.command("remove")
def remove_engines(
    run_dir: RunDirectory, engines: Annotated[list[str], typer.Argument(metavar="ENGINE...", help="E.g. engine-1.")]
) -> None:
    """End engines of the run of RUN_DIR; what they have under way goes on in the others, without loss."""
    _ask_for_engines(run_dir, remove=engines)


def _ask_for_engines(run_dir: Path, add: int = 0, remove: list[str] | None = None) -> None:
    from slimerl.conductor.elastic import EngineRequest, ask
    from slimerl.resilience.deadline import DeadlineExceeded

    if not run_dir.is_dir() or not _held(run_dir):
        _fail(f"no run holds {run_dir}: is it the directory of a run that goes on?", 2)
    try:
        answer = ask(run_dir, EngineRequest(add, remove or []), ENGINES_S)
    except DeadlineExceeded as error:
        _fail(str(error), 1)
    if answer.refused:
        _fail(answer.refused, 2)
    typer.echo(f"{'added' if add else 'removed'}: {', '.join(answer.engines)}")


@app.command()
def trace(run_dir: RunDirectory) -> None:
    """Merge what every role of a run recorded of its phases into RUN_DIR/trace.json, for https://ui.perfetto.dev.

    A run does this at its end by itself; this shows one that still goes on.
    """
    from slimerl.telemetry.perfetto import TRACE_FILE, TraceError, write_trace

    try:
        Console(markup=False).print(f"{write_trace(run_dir)}: open it in https://ui.perfetto.dev", soft_wrap=True)
    except TraceError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{run_dir / TRACE_FILE} cannot be written: {error}", 2)


def _held(run_dir: Path) -> bool:
    from slimerl.conductor.run_directory import RunDirectoryTaken, is_held

    try:
        return is_held(run_dir)
    except RunDirectoryTaken as error:
        _fail(str(error), 2)


def _loaded(path: Path, overrides: list[str] | None) -> RunSpec:
    try:
        return load_spec(path, overrides or ())
    except SpecError as error:
        _fail(str(error), 2)


def _checked(path: Path, overrides: list[str] | None) -> RunSpec:
    from slimerl.conductor.preflight.whole import preflight

    spec = _loaded(path, overrides)
    faults = preflight(spec)
    if faults:
        _fail("\n".join(faults), 2)
    return spec


def _job(spec: RunSpec) -> "Job":
    """That this process is part of; it can have the roles of the spec."""
    from slimerl.conductor.restarts import has_cuda
    from slimerl.conductor.slurm import NoJob, job_faults, job_of

    try:
        job = job_of(os.environ)
    except NoJob as error:
        _fail(str(error), 2)
    if faults := list(job_faults(spec, job, has_cuda())):
        _fail("\n".join(faults), 2)
    return job


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
