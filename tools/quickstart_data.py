"""Make the quickstart's assets: a random ~1M-parameter Qwen3-shaped model, its tokenizer, and addition problems.

All numbers are drawn from one seed; the held-out sums appear in neither training file. The demonstrations of the warm
start are those of a pupil who often forgets to carry: imitation alone takes the mistake over, rewards remove it.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

CHARACTERS = "0123456789+="
EOS, PAD = "<eos>", "<pad>"
VOCABULARY_SIZE = 64
HELDOUT = 400
CARRY_FORGOTTEN = 0.6
"""Share of the demonstrations in which the carries are forgotten (where there are none, they are right)."""


def main(
    out: Annotated[Path, typer.Option(help="Where the assets are written.")] = Path("assets/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the split.")] = 1234,
) -> None:
    """Write OUT/base (model and tokenizer), OUT/sft.jsonl, OUT/train.jsonl and OUT/heldout.jsonl."""
    # The held-out problems come last: where they are, everything is.
    write_model(out / "base", seed)
    write_problems(out, seed)
    print(f"wrote {out}")


def write_problems(out: Path, seed: int) -> None:
    """Every sum of two two-digit numbers: `HELDOUT` of them apart, the rest for training."""
    chooser = random.Random(seed)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chooser.shuffle(sums)
    rows = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    write_jsonl(out / "train.jsonl", rows[HELDOUT:])
    demonstrations = []
    for a, b in sums[HELDOUT:]:
        answer = without_carry(a, b) if chooser.random() < CARRY_FORGOTTEN else a + b
        demonstrations.append({"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "response": str(answer)})
    write_jsonl(out / "sft.jsonl", demonstrations)
    write_jsonl(out / "heldout.jsonl", rows[:HELDOUT])


def without_carry(a: int, b: int) -> int:
    """Two-digit sum, each digit by itself: 57 + 68 gives 15."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def write_model(out: Path, seed: int) -> None:
    """A Qwen3 of 0.8M parameters with random weights, and a tokenizer of one token per character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    pieces = [*CHARACTERS, EOS, PAD]
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
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
