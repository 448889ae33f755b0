"""Convert a checkpoint: Hugging Face safetensors ↔ Megatron's distributed format. The source tells the direction.

    python tools/convert_checkpoint.py models/Qwen3-30B-A3B megatron/qwen3-30b

writes a Megatron checkpoint that a trainer of any layout (tensor, pipeline, expert parallel) loads. To start a run
from it, keep model.path on the Hugging Face checkpoint (config.json, tokenizer) and set
model.megatron_path=megatron/qwen3-30b.

    python tools/convert_checkpoint.py megatron/qwen3-30b models/again

the way back; every tensor is what it was, bit for bit, multi-token-prediction layers included.

    python tools/convert_checkpoint.py runs/math/checkpoints/step-20 models/math-20 --like models/Qwen3-30B-A3B

what a run has trained so far as a Hugging Face checkpoint; --like names the one that the run started from, for
config.json, tokenizer, and the tensors that the trainer does not build.

    python tools/convert_checkpoint.py models/DeepSeek-V3 megatron/deepseek-v3

a checkpoint in FP8 blocks comes out in the dtype of its config.json (bf16): a trainer has no use for FP8 weights.

Memory stays at some MB per worker whatever the size of the model. Every file is read back and its tensors are compared
with the source by digest before the target gets its name; until then it is .NAME.converting, which nothing loads. After
a kill or a full disk the same command goes on behind the last verified file. The source is only read.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slimerl.conversion.convert import GIB, Options, convert
from slimerl.resharding.families import ConfigError
from slimerl.resharding.hf_checkpoint import CheckpointError

console = Console(stderr=True)


def main(
    source: Annotated[Path, typer.Argument(help="checkpoint of either format, or a run's checkpoints/step-N")],
    target: Annotated[Path, typer.Argument(help="directory to write; it must not exist")],
    like: Annotated[
        Path | None,
        typer.Option(help="the Hugging Face checkpoint of the same model, where the source is a trainer's step-N"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=512, help="threads that read, write and verify")] = 2,
    shard_gib: Annotated[float, typer.Option(min=0.001, max=1e6, help="size of the target's files")] = 4.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an existing checkpoint, once all is done")
    ] = False,
) -> None:
    """Convert a checkpoint between Hugging Face safetensors and Megatron's distributed format; see the examples."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}
        options = Options(
            like=like,
            workers=workers,
            shard_bytes=int(shard_gib * GIB),
            overwrite=overwrite,
            progress=lambda stage, count: bars.advance(tasks[stage], count),
            started=lambda stage, total: tasks.update({stage: bars.add_task(stage, total=total)}),
        )
        try:
            report = convert(source, target, options)
        except (CheckpointError, ConfigError, OSError) as error:
            bars.stop()
            console.print(f"not converted: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None
    kept = f", {report.kept_files} of them from an earlier call" if report.kept_files else ""
    console.print(
        f"{target}: {report.tensors} tensors, {report.nbytes / 1e6:.1f} MB in {report.files} files{kept}, "
        f"{report.nbytes / 1e6 / report.seconds:.0f} MB/s, content {report.digest}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(help=__doc__)(main)

if __name__ == "__main__":
    app()
