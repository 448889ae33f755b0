"""The command line: `slimerl run`, `slimerl check`, and the roles one by one."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from slimerl.spec import RunSpec, SpecError, load_spec

app = typer.Typer(
    help="Reinforcement learning of large language models: megatron-core trains, SGLang generates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file; examples in configs/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override keys of the spec, e.g. training.parallel.tensor=2"),
]


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace the record of an earlier run.")] = False,
) -> None:
    """Start every role of SPEC on this machine, watch them, and print the result.

    Exit code 0: the run finished; 1: it failed (the reason is printed); 2: the spec cannot be used;
    130 or 143: interrupted.
    """
    from slimerl.conductor.run import RunDirectoryTaken, Terminated
    from slimerl.conductor.run import run as conduct
    from slimerl.conductor.supervise import RoleFailed

    checked = _checked(spec, overrides)
    try:
        conduct(checked, Console(), fresh)
    except RunDirectoryTaken as error:
        _fail(str(error), 2)
    except RoleFailed as error:
        _fail(f"run {checked.name} failed: {error}", 1)
    except KeyboardInterrupt:
        _fail(f"run {checked.name} interrupted; every role has ended", 130)
    except Terminated:
        _fail(f"run {checked.name} terminated; every role has ended", 143)


@app.command()
def check(spec: SpecFile, overrides: Overrides = None) -> None:
    """Check SPEC against this machine and its files without starting anything, and print what follows from it."""
    from slimerl.conductor.preflight import derived_table

    Console().print(derived_table(_checked(spec, overrides)))


@app.command()
def engine(
    spec: SpecFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(help="Which of the spec's engine.replicas this is.")] = 0,
) -> None:
    """Run one engine role: an SGLang server that registers with the rollout role."""
    from slimerl.engine.__main__ import main

    raise typer.Exit(main([str(spec), *(overrides or ()), "--index", str(index)]))


@app.command()
def rollout(spec: SpecFile, overrides: Overrides = None) -> None:
    """Run the rollout role: prompts, scheduling, rewards, sample store and control service."""
    from slimerl.rollout.__main__ import main

    raise typer.Exit(main(_loaded(spec, overrides)))


def _loaded(path: Path, overrides: list[str] | None) -> RunSpec:
    try:
        return load_spec(path, overrides or ())
    except SpecError as error:
        _fail(str(error), 2)


def _checked(path: Path, overrides: list[str] | None) -> RunSpec:
    from slimerl.conductor.preflight import preflight

    spec = _loaded(path, overrides)
    faults = preflight(spec)
    if faults:
        _fail("\n".join(faults), 2)
    return spec


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
