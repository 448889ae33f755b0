"""What is checked before anything starts: the spec against its files and this machine.

Flows in: a valid `RunSpec`. Flows out: one line per fault, each naming the key and the fix; none: it can start.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.table import Table

from slimerl.resharding.coverage import CoverageError
from slimerl.resharding.families import ConfigError, family_of
from slimerl.resharding.layouts import EngineLayout, LayoutError, MegatronLayout
from slimerl.resharding.sync_plan import plan_sync
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
    return [*model, *data, *_check_directory("output_dir", spec.run_dir), *_check_export(spec)]


def _caught(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except (ConfigError, CoverageError, LayoutError, DataError, TokenizerError, UnsupportedModel) as error:
        yield str(error)


def _check_model(spec: RunSpec) -> None:
    config = read_config(spec.model.path)
    arguments = model_arguments(config)
    check_divisible(arguments, spec.training.parallel)
    parallel = spec.training.parallel
    trainer = MegatronLayout(tensor=parallel.tensor, data=parallel.data)
    engine = EngineLayout(tensor=spec.engine.tensor_parallel if spec.uses_engines else 1)
    first_replica, bucket_bytes = range(parallel.tensor), spec.sync.bucket_mib * 2**20
    try:
        plan_sync(config, family_of(config), trainer, first_replica, engine, torch.float32, bucket_bytes)
    except LayoutError as error:
        sizes = f"training.parallel.tensor = {parallel.tensor}, engine.tensor_parallel = {engine.tensor}"
        raise LayoutError(f"{sizes}: {error}") from None
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


def _check_directory(key: str, directory: Path) -> Iterator[str]:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield f"{key}: {existing} is not writable; set {key} to a directory that is"
    elif shutil.disk_usage(existing).free < GIB:
        yield f"{key}: less than 1 GiB is free on the disk of {existing}"


def _check_export(spec: RunSpec) -> Iterator[str]:
    """The export replaces its directory as a whole: it must not be one that holds something else."""
    key, target = "training.export_path", spec.export_dir.resolve()
    inputs = [spec.model.path, spec.data.train_path, *([spec.data.eval_path] if spec.data.eval_path else [])]
    for kept in (Path.cwd(), spec.run_dir, *inputs):
        if target == kept.resolve() or target in kept.resolve().parents:
            yield f"{key}: {target} would be replaced, but holds {kept}; set {key} to a directory of its own"
            return
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        yield f"{key}: {target} exists and is no checkpoint; set {key} to a directory of its own"
    yield from _check_directory(key, target)


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
