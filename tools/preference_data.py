"""Make the quickstart's preference data: right sums, each preferred to a wrong one.

Reads the problems that `tools/quickstart_data.py` has written. What is rejected is the sum of a pupil who forgets to
carry, where that is wrong, or a sum with another digit in it.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer
from quickstart_data import without_carry, write_jsonl

FORGOTTEN = 0.6
"""Share of the pairs whose wrong sum lacks its carries, where there are any."""


def main(
    source: Annotated[Path, typer.Option(help="Where the quickstart's problems are.")] = Path("assets/quickstart"),
    out: Annotated[Path | None, typer.Option(help="Where the pairs are written.", show_default="SOURCE")] = None,
    seed: Annotated[int, typer.Option(help="Of the wrong sums.")] = 1234,
) -> None:
    """Write OUT/preferences.jsonl and OUT/preferences_heldout.jsonl."""
    chooser = random.Random(seed)
    for problems, pairs in (("train", "preferences"), ("heldout", "preferences_heldout")):
        lines = (source / f"{problems}.jsonl").read_text(encoding="utf-8").splitlines()
        write_jsonl((out or source) / f"{pairs}.jsonl", [pair(json.loads(line), chooser) for line in lines])
    print(f"wrote {out or source}")


def wrong_sum(a: int, b: int, chooser: random.Random) -> str:
    """That of the pupil who forgets to carry, or with another digit in it."""
    right, wrong = str(a + b), str(without_carry(a, b))
    if wrong == right or chooser.random() >= FORGOTTEN:
        place = chooser.randrange(len(right))
        digit = chooser.choice([each for each in "0123456789" if each != right[place]])
        wrong = right[:place] + digit + right[place + 1 :]
    return wrong


def pair(row: dict[str, Any], chooser: random.Random) -> dict[str, str]:
    """Chosen: the row's answer."""
    a, b = map(int, row["prompt"].rstrip("=").split("+"))
    wrong = wrong_sum(a, b, chooser)
    return {"id": row["id"], "prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong}


if __name__ == "__main__":
    typer.run(main)
