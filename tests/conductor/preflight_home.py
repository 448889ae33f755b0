"""What spoils one thing in a sound directory (`home`, see `conftest.py`), and what `slimerl check` says of it."""

import json

from typer.testing import CliRunner

from slimerl.cli import app

ROW = {"id": "a", "prompt": "1+1=", "answer": "2", "response": "2"}


def write_rows(home, *rows):
    (home / "train.jsonl").write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )


def change(file, **values):
    """Set keys of a JSON file; None removes."""
    tree = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def listing(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


def check(home, *overrides):
    """(exit code, lines on standard error); nothing may be written."""
    before = listing(home)
    result = CliRunner().invoke(app, ["check", "spec.yaml", *overrides])
    assert listing(home) == before
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr.splitlines()
