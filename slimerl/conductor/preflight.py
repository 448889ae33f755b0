"""What is checked before anything starts: the spec against its files and this machine.

Flows in: a valid `RunSpec`. Flows out: one line per fault, each naming the key and the fix; none: it can start.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.table import Table

from slimerl.resharding.families import ConfigError, family_of
from slimerl.resharding.layouts import LayoutError
from slimerl.rollout.prompts import read_rows, tokenize_rows
from slimerl.rollout.tokenizer import PromptTokenizer, TokenizerError
from slimerl.samples.rows import DataError
from slimerl.spec import RunSpec
from slimerl.training.model_config import UnsupportedModel, check_divisible, model_arguments, read_config

GIB = 1024**3


def preflight(spec: RunSpec) -> list[str]:
    """Faults of the spec on this machine, in the order in which they would strike."""
    model = list(_caught(lambda: _check_model(spec)))
    # Prompts are tokenised with the model's tokenizer: without a model there is nothing to check them with.
    data = [] if model else list(_caught(lambda: _check_data(spec)))
    return [*model, *data, *_check_directory(spec.run_dir)]


def _caught(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except (ConfigError, LayoutError, DataError, TokenizerError, UnsupportedModel) as error:
        yield str(error)


def _check_model(spec: RunSpec) -> None:
    config = read_config(spec.model.path)
    arguments = model_arguments(config)
    family_of(config)
    check_divisible(arguments, spec.training.parallel)
    heads = arguments.transformer["num_attention_heads"]
    if spec.uses_engines and heads % spec.engine.tensor_parallel:
        raise UnsupportedModel(
            f"engine.tensor_parallel = {spec.engine.tensor_parallel} does not divide the model's "
            f"num_attention_heads = {heads}"
        )
    longest = spec.engine.context_tokens
    if spec.uses_engines and longest > arguments.max_sequence_tokens:
        raise UnsupportedModel(
            f"engine.context_tokens = {longest} exceeds the model's max_position_embeddings = "
            f"{arguments.max_sequence_tokens}"
        )


def _check_data(spec: RunSpec) -> None:
    tokenizer = PromptTokenizer(spec.model.path, spec.data)
    target = "answer" if spec.uses_engines else "response"
    for path in (spec.data.train_path, spec.data.eval_path):
        if path is not None:
            tokenize_rows(read_rows(path, target), tokenizer.encode, spec.data.max_prompt_tokens, str(path))


def _check_directory(run_dir: Path) -> Iterator[str]:
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield f"output_dir: {existing} is not writable; set output_dir to a directory that is"
    elif shutil.disk_usage(existing).free < GIB:
        yield f"output_dir: less than 1 GiB is free on the disk of {existing}"


def derived_table(spec: RunSpec) -> Table:
    """What follows from the spec."""
    arguments = model_arguments(read_config(spec.model.path))
    training, rollout = spec.training, spec.rollout
    table = Table(title=f"run {spec.name}: ready", title_justify="left", show_header=False)
    rows = {
        "model": f"{spec.model.path} ({arguments.transformer['num_layers']} layers, "
        f"hidden {arguments.transformer['hidden_size']}, {spec.model.dtype})",
        "trainer ranks": f"{training.parallel.world_size} = tensor {training.parallel.tensor} "
        f"× data {training.parallel.data}",
        "steps": str(training.steps),
        "run directory": str(spec.run_dir),
        "trained model": str(spec.export_dir),
    }
    if spec.uses_engines:
        rows |= {
            "engines": f"{spec.engine.replicas} × tensor {spec.engine.tensor_parallel}",
            "samples per step": f"{training.prompts_per_step * rollout.samples_per_prompt} = "
            f"{training.prompts_per_step} prompts × {rollout.samples_per_prompt}",
            "staleness": f"{rollout.max_staleness} ({_mode(rollout.max_staleness)})",
        }
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def _mode(staleness: int) -> str:
    return {0: "synchronous", 1: "one step off"}.get(staleness, "asynchronous")
