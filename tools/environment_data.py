"""Write the data files of a run whose environment is reasoning-gym or verifiers: one row for each of its tasks.

    .venv/bin/python tools/environment_data.py reasoning_gym leg_counting --size 2000 --heldout 200 --out data/legs
    .venv/bin/python tools/environment_data.py verifiers my_env --size 500 --heldout 50 --out data/my_env

The package must be installed; options of the data set or environment go behind, as `max_animals=5`.
"""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from slimerl.environments.made import ADAPTERS


def main(
    adapter: Annotated[str, typer.Argument(help="reasoning_gym or verifiers.")],
    name: Annotated[str, typer.Argument(help="Of the data set, or the environment.")],
    out: Annotated[Path, typer.Option(help="Where train.jsonl and heldout.jsonl are written.")],
    size: Annotated[int, typer.Option(help="Tasks in all.")] = 1000,
    heldout: Annotated[int, typer.Option(help="Of these the last, for evaluation.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the tasks of reasoning-gym.")] = 1234,
    options: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE of the data set or environment.")] = None,
) -> None:
    """Write OUT/train.jsonl and OUT/heldout.jsonl."""
    if adapter not in ADAPTERS:
        raise typer.BadParameter(f"there is no adapter '{adapter}'; choose one of {', '.join(ADAPTERS)}")
    module, package = ADAPTERS[adapter]
    try:
        adapted = importlib.import_module(module)
    except ImportError as error:
        raise typer.BadParameter(f"{adapter} is not installed here ({error}); pip install {package}") from error
    given: dict[str, Any] = {
        key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in options or [])
    }
    if adapter == "reasoning_gym":
        given["seed"] = seed
    rows = list(adapted.rows(name, size, **given))
    if not 0 < heldout < len(rows):
        raise typer.BadParameter(f"{heldout} of {len(rows)} tasks cannot be held out")
    out.mkdir(parents=True, exist_ok=True)
    for file, part in (("train.jsonl", rows[:-heldout]), ("heldout.jsonl", rows[-heldout:])):
        (out / file).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    print(f"wrote {len(rows)} rows to {out}")


if __name__ == "__main__":
    typer.run(main)
