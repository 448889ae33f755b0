"""Measures checkpoint conversion: memory, speed, and the ratio to a plain copy of the same files.

    python tools/bench_conversion.py --scratch /big/disk --model assets/smollm2/model
    python tools/bench_conversion.py --scratch /big/disk --moe-gib 4.5 --repeats 3

The first measures a checkpoint of yours, the second a mixture of experts in the shape of Qwen3-MoE that it writes
itself (random weights, bf16, files of 1 GiB); both may be given. Each repeat converts to Megatron's format and back,
and before each of the two copies the same files with `cp`; the middle of the repeats is shown. Two times are given of a
copy: until `cp` returns, and until the copy is on the disk, where a conversion is when it returns. All is done in a
directory of its own under --scratch (four times the checkpoint), which is removed at the end.
"""

import json
import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from slimerl.conversion.convert import GIB, Options, Report, convert, is_distributed
from slimerl.conversion.files import Stored
from slimerl.conversion.sources import HfSource
from slimerl.conversion.stream import digest_of
from slimerl.conversion.targets import HfTarget
from slimerl.resharding.families import family_of

console = Console()

MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B's config.json with half of its experts; the number of layers follows from the size asked for."""
GOAL_RATIO, GOAL_SHARDS = 0.5, 2.0
_RANDOM_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Measured:
    report: Report
    peak_bytes: int
    """Resident memory above what the process had before it began."""


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _convert(source: Path, target: Path, workers: int) -> Measured:
    """In a process of its own."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    idle = _memory("VmRSS")
    report = convert(source, target, Options(workers=workers))
    return Measured(report, _memory("VmHWM") - idle)


def measured(source: Path, target: Path, workers: int) -> Measured:
    """A conversion in a fresh process, and what it took."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_convert, (source, target, workers))


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Seconds until `cp` returns, and until its files are on the disk."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    returned = time.perf_counter() - begun
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return returned, time.perf_counter() - begun


def write_moe(directory: Path, nbytes: int) -> Path:
    """A random mixture of experts of at least so many bytes."""
    layers, family = 0, family_of(MOE)
    config = {**MOE, "num_hidden_layers": 1}
    while family.nbytes(config, torch.bfloat16) < nbytes:
        layers += 1
        config = {**MOE, "num_hidden_layers": layers}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {each.name: Stored(each.shape, torch.bfloat16) for each in family.checkpoint_tensors(config)}
    target = HfTarget(directory, tensors, GIB)
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, _RANDOM_BYTES, dtype=np.uint8)
    for file in target.files:
        target.create(file)
        for name in file.tensors:
            stored = tensors[name]
            height = max(1, _RANDOM_BYTES // 2 // stored.row_bytes)
            for first in range(0, stored.rows, height):
                size = (min(stored.rows, first + height) - first) * stored.row_bytes
                at = int(random.integers(0, _RANDOM_BYTES - size + 1))
                target.write(name, first, noise[at : at + size])
        target.seal(file)
    target.finish()
    target.close()
    return directory


def content(directory: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of each tensor, read apart from the conversion that is measured."""
    source = HfSource(directory)
    buffer = np.empty(2**24, np.uint8)
    for name in source.tensors:
        yield name, digest_of(source, name, buffer)
    source.close()


def bench(title: str, model: Path, scratch: Path, workers: int, repeats: int) -> bool:
    """Prints a table; whether the goals are met."""
    largest = max(path.stat().st_size for path in model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    ways = {"to Megatron": (model, scratch / "megatron"), "to Hugging Face": (scratch / "megatron", scratch / "back")}
    copies: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    conversions: dict[str, list[Measured]] = {way: [] for way in ways}
    same = True
    for _ in range(repeats):
        for way, (source, target) in ways.items():
            copies[way].append(copied(source, scratch / "copy"))
            shutil.rmtree(scratch / "copy")
            conversions[way].append(measured(source, target, workers))
        assert is_distributed(scratch / "megatron")
        same = same and dict(content(model)) == dict(content(scratch / "back"))
        for _, target in ways.values():
            shutil.rmtree(target)
    met = same
    table = Table("", "MB/s", "cp", "cp to disk", "of cp", "of cp to disk", "peak MB above idle", "of the largest file")
    table.title = title
    for way in ways:
        returned, durable = (median(each) for each in zip(*copies[way], strict=True))
        seconds = median(each.report.seconds for each in conversions[way])
        peak = max(each.peak_bytes for each in conversions[way])
        met = met and durable / seconds >= GOAL_RATIO and peak <= GOAL_SHARDS * largest
        speeds = (f"{size / each / 1e6:.0f}" for each in (seconds, returned, durable))
        ratios = f"{returned / seconds:.2f}", f"{durable / seconds:.2f}"
        table.add_row(way, *speeds, *ratios, f"{peak / 1e6:.0f}", f"{peak / largest:.2f}")
    console.print(table)
    console.print(
        f"{size / 1e9:.2f} GB, the largest file {largest / 1e6:.0f} MB; {workers} workers, {repeats} repeats; "
        f"the way there and back {'changed nothing' if same else 'CHANGED THE WEIGHTS'}"
    )
    return met


def main(
    scratch: Annotated[Path, typer.Option(help="where to write; needs four times the checkpoint")],
    model: Annotated[Path | None, typer.Option(help="a Hugging Face checkpoint")] = None,
    moe_gib: Annotated[float, typer.Option(help="size of the mixture of experts that is made; 0: none")] = 0.0,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Ends with 1 where a goal is missed: half the speed of a copy to the disk, twice the largest file in memory."""
    if model is None and not moe_gib:
        raise typer.BadParameter("give --model, --moe-gib, or both")
    met = True
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        if model is not None:
            met = bench(str(model), model, Path(made), workers, repeats)
        if moe_gib:
            moe = write_moe(Path(made) / "moe", int(moe_gib * GIB))
            met = bench("mixture of experts", moe, Path(made), workers, repeats) and met
    raise typer.Exit(0 if met else 1)


if __name__ == "__main__":
    typer.run(main)
