"""Options of an engine that SGLang does not know are told before anything is started."""

from pathlib import Path

import pytest
from engine_fixtures import engine_spec

from slimerl.engine.launcher import Device, server_arguments
from slimerl.engine.server_options import known_options, unknown_options

FIELDS = """
class Parallel(msgspec.Struct):
    tp_size: A[int, Arg(help="x", aliases=["--tensor-parallel-size"])] = 1
    model_path: A[str, "help"]
    context_length: A[Optional[int], Arg(cli_name="--context-length", help="--not-an-option")] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    rank: int = 0
    dp_size: Annotated[int, "help"] = 1
    tf32: A[bool, Arg(action=argparse.BooleanOptionalAction)] = True
"""
CALLS = """
def add_cli_args(parser):
    parser.add_argument("--config", "-c", type=str, help="--no")
"""


def package(home: Path, fields: str = FIELDS) -> Path:
    (home / "srt/arg_groups/fields").mkdir(parents=True)
    (home / "srt/arg_groups/fields/parallel.py").write_text(fields)
    (home / "srt/server_args.py").write_text(CALLS)
    return home


def test_options_are_read_from_fields_and_calls(tmp_path):
    assert known_options(package(tmp_path)) == {
        *(
            "--tp-size",
            "--tensor-parallel-size",
            "--model-path",
            "--context-length",
            "--dp-size",
            "--config",
            "--tf32",
            "--no-tf32",
        )
    }


@pytest.mark.parametrize("fields", ["class Parallel: ...", "class Parallel("])
def test_declarations_that_are_not_understood_say_nothing(tmp_path, fields):
    assert known_options(package(tmp_path, fields)) == frozenset()
    assert list(unknown_options(["--anything"], frozenset())) == []


def test_an_unknown_option_comes_with_the_one_that_was_meant():
    known = frozenset({"--attention-backend", "--mem-fraction-static"})
    given = ["--atention-backend", "triton", "--mem-fraction", "0.5", "--mem-fraction-statics=-1", "-1", "--attention"]
    assert list(unknown_options(given, known)) == [
        ("--atention-backend", "--attention-backend"),
        ("--mem-fraction-statics", "--mem-fraction-static"),
    ]


def test_the_installed_server_knows_what_the_launcher_tells_it():
    spec = engine_spec(Path("/m"), Path("/r"), tensor_parallel=2, expert_parallel=2, data_parallel_attention=2)
    told = [each for device in Device for each in server_arguments(spec, 0, device, 1)]
    assert len(known_options()) > 100
    assert not list(unknown_options(told, known_options()))
