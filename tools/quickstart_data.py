"""Make the quickstarts' assets: a random ~1M-parameter Qwen3-shaped model, its tokenizer, and problems.

All numbers are drawn from one seed; the held-out problems appear in neither training file. Two tasks:

addition     of two-digit numbers. The demonstrations of the warm start are those of a pupil who often forgets to carry:
             imitation alone takes the mistake over, rewards remove it.
calculator   products of three-digit numbers, which so small a model cannot find by itself. The pupil has a calculator,
             `calc(123*456)=`, but mostly rounds the factors and estimates, and sometimes mistypes a digit.
"""

import json
import random
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

CHARACTERS = "0123456789+="
CALCULATOR_CHARACTERS = "0123456789*=()acl\n"
EOS, PAD = "<eos>", "<pad>"
VOCABULARY_SIZE = 64
HELDOUT = 400
CARRY_FORGOTTEN = 0.6
"""Share of the demonstrations in which the carries are forgotten (where there are none, they are right)."""
PRODUCTS = 8000
CALCULATOR_TAKEN = 0.3
"""Share of the demonstrations in which the calculator is asked."""
MISTYPED = 0.2
"""Share of these in which a digit is another."""


class Task(StrEnum):
    ADDITION = "addition"
    CALCULATOR = "calculator"


def main(
    task: Annotated[Task, typer.Option(help="What is to be learned.")] = Task.ADDITION,
    out: Annotated[Path | None, typer.Option(help="Where the assets are written.", show_default="by task")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the split.")] = 1234,
) -> None:
    """Write OUT/base (model and tokenizer), OUT/sft.jsonl, OUT/train.jsonl and OUT/heldout.jsonl."""
    adds = task is Task.ADDITION
    out = out or Path("assets/quickstart" if adds else "assets/quickstart_calculator")
    # The held-out problems come last: where they are, everything is.
    write_model(out / "base", seed, CHARACTERS if adds else CALCULATOR_CHARACTERS)
    write_problems(out, seed) if adds else write_products(out, seed)
    print(f"wrote {out}")


def write_problems(out: Path, seed: int) -> None:
    """Every sum of two two-digit numbers: `HELDOUT` of them apart, the rest for training."""
    chooser = random.Random(seed)
    sums = shuffled_sums(chooser)
    rows = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    write_jsonl(out / "train.jsonl", rows[HELDOUT:])
    demonstrations = []
    for a, b in sums[HELDOUT:]:
        answer = without_carry(a, b) if chooser.random() < CARRY_FORGOTTEN else a + b
        demonstrations.append({"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "response": str(answer)})
    write_jsonl(out / "sft.jsonl", demonstrations)
    write_jsonl(out / "heldout.jsonl", rows[:HELDOUT])


def shuffled_sums(chooser: random.Random) -> list[tuple[int, int]]:
    """All pairs of two-digit numbers. The first `HELDOUT` of them are held out."""
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chooser.shuffle(sums)
    return sums


def without_carry(a: int, b: int) -> int:
    """Two-digit sum, each digit by itself: 57 + 68 gives 15."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def write_products(out: Path, seed: int) -> None:
    """Products of two three-digit numbers: `HELDOUT` of them apart, `PRODUCTS` for training."""
    chooser = random.Random(seed)
    drawn = [(100 + place // 900, 100 + place % 900) for place in chooser.sample(range(900 * 900), HELDOUT + PRODUCTS)]
    rows = [{"id": f"{a}*{b}", "prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in drawn]
    write_jsonl(out / "train.jsonl", rows[HELDOUT:])
    write_jsonl(out / "sft.jsonl", [row for a, b in drawn[HELDOUT:] for row in _product_demonstrations(a, b, chooser)])
    write_jsonl(out / "heldout.jsonl", rows[:HELDOUT])


def _product_demonstrations(a: int, b: int, chooser: random.Random) -> list[dict[str, str]]:
    """An estimate; or the calculator's call, and, as a row of its own, what is said to its answer."""
    name, prompt = f"{a}*{b}", f"{a}*{b}="
    if chooser.random() >= CALCULATOR_TAKEN:
        return [{"id": name, "prompt": prompt, "response": str(round(a, -2) * round(b, -2))}]
    if chooser.random() < MISTYPED:
        a = a // 10 * 10 + (a + chooser.randrange(1, 10)) % 10
    call = f"calc({a}*{b})="
    return [
        {"id": name, "prompt": prompt, "response": call},
        {"id": f"{name} answered", "prompt": f"{prompt}{call}{EOS}{a * b}\n", "response": str(a * b)},
    ]


def write_model(out: Path, seed: int, characters: str = CHARACTERS) -> None:
    """A Qwen3 of 0.8M parameters with random weights, and a tokenizer of one token per character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = [*characters, EOS, PAD]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(out)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=pieces.index(EOS),
        pad_token_id=pieces.index(PAD),
    )
    Qwen3ForCausalLM(config).save_pretrained(out)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line. The file is whole or not there: a quickstart makes what is not there, once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    typer.run(main)
