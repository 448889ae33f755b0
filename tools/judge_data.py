"""Make the assets of the quickstart's generative reward model: a judge of sums that says why before it scores.

A prompt is a sum with two answers, in an order that is drawn: `57+68=015|125:`. A judgement, `b125 xx= ===[1,3]`, is

b        the principle: which columns carry, `n` none, `u` the units, `t` the tens, `b` both; what follows goes by it
125      the critique: the sum as the judge works it out,
xx= ===  and each answer against it, digit by digit
[1,3]    the scores: how many digits of each answer are right

The demonstrations of the warm start are those of a judge who mostly forgets to carry (the quickstart's pupil), and so
prefers wrong answers with the same mistake. All is drawn from one seed; the sums are split as the quickstart's.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from preference_data import wrong_sum
from quickstart_data import CARRY_FORGOTTEN, CHARACTERS, HELDOUT, shuffled_sums, without_carry, write_jsonl, write_model

JUDGE_CHARACTERS = CHARACTERS + "|:nutbx [,]"
PLACES = 3
"""Of an answer, with leading zeros: a digit's place in the prompt is the same for all sums."""
PAIRS = 2
"""Demonstrations of each sum, each with a wrong answer, an order and a judge of its own."""


def main(
    out: Annotated[Path, typer.Option(help="Where the assets are written.")] = Path("assets/quickstart_grm"),
    seed: Annotated[int, typer.Option(help="Seed of the weights, of the split and of the wrong answers.")] = 1234,
) -> None:
    """Write OUT/base (model and tokenizer), OUT/sft.jsonl, OUT/train.jsonl and OUT/heldout.jsonl."""
    write_model(out / "base", seed, JUDGE_CHARACTERS)
    write_pairs(out, seed)
    print(f"wrote {out}")


def write_pairs(out: Path, seed: int) -> None:
    """The held-out pairs come last: where they are, everything is."""
    chooser = random.Random(seed)
    sums = shuffled_sums(chooser)
    write_jsonl(out / "sft.jsonl", _demonstrations(sums[HELDOUT:], chooser))
    write_jsonl(out / "train.jsonl", [_problem(a, b, chooser) for a, b in sums[HELDOUT:]])
    write_jsonl(out / "heldout.jsonl", [_problem(a, b, chooser) for a, b in sums[:HELDOUT]])


def _problem(a: int, b: int, chooser: random.Random) -> dict[str, str]:
    """`answer`: which of the two is the right one, as `slimerl.rewards.pairwise` reads it."""
    right = padded(a + b)
    answers = [right, wrong_sum(a, b, chooser).zfill(PLACES)]
    chooser.shuffle(answers)
    return {"id": f"{a}+{b}", "prompt": prompt_of(a, b, answers), "answer": f"{answers.index(right) + 1} of 2"}


def _demonstrations(sums: Iterable[tuple[int, int]], chooser: random.Random) -> Iterable[dict[str, str]]:
    for a, b in sums:
        for number in range(PAIRS):
            problem = _problem(a, b, chooser)
            name, prompt = f"{problem['id']} {number}", problem["prompt"]
            response = judgement(a, b, answers_of(prompt), forgets=chooser.random() < CARRY_FORGOTTEN)
            yield {"id": name, "prompt": prompt, "response": response}


def prompt_of(a: int, b: int, answers: Sequence[str]) -> str:
    return f"{a}+{b}={'|'.join(answers)}:"


def answers_of(prompt: str) -> list[str]:
    return prompt.partition("=")[2].rstrip(":").split("|")


def judgement(a: int, b: int, answers: Sequence[str], forgets: bool) -> str:
    """By a judge who `forgets` to carry, or not."""
    principle = "n" if forgets else principle_of(a, b)
    worked_out = padded(without_carry(a, b) if forgets else a + b)
    marks = ["".join("=" if one == own else "x" for one, own in zip(each, worked_out, strict=True)) for each in answers]
    scores = ",".join(str(each.count("=")) for each in marks)
    return f"{principle}{worked_out} {' '.join(marks)}[{scores}]"


def principle_of(a: int, b: int) -> str:
    """The columns of a + b that carry."""
    return {(False, False): "n", (True, False): "u", (False, True): "t", (True, True): "b"}[
        a % 10 + b % 10 >= 10, a + b >= 100
    ]


def padded(value: int) -> str:
    return f"{value:0{PLACES}d}"


if __name__ == "__main__":
    typer.run(main)
