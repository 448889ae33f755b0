"""The weights of a distributed checkpoint, without the rest of its state: where a new run starts.

Flows in: a checkpoint that `tools/convert_checkpoint.py` wrote, or that a run of any layout left (`step-N`). Flows out:
filled parameters; each rank reads its own parts. Invariant: every parameter has come from the checkpoint, whose files
are what their manifest says; optimizer, schedule and random numbers begin anew, as they do from a Hugging Face one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from slimerl.resharding.coverage import some_names
from slimerl.resharding.hf_checkpoint import CheckpointError
from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.content import model_names, sharding_metadata
from slimerl.training.checkpoint.directory import Manifest
from slimerl.training.checkpoint.resume import verified
from slimerl.training.engine_layout import differences
from slimerl.training.model import unwrapped
from slimerl.training.model_config import read_config
from slimerl.training.parallel import Grid
from slimerl.training.weights import keep_buffers_wide, named_parameters


def load_megatron_weights(
    chunks: Sequence[torch.nn.Module], checkpoint: Path, model_path: Path, config: Mapping[str, Any], grid: Grid
) -> None:
    """Fill every parameter of this rank; another dtype is converted. Called on every rank, before wrapping.

    Args:
        model_path, config: the Hugging Face checkpoint of the same model.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    manifest, fault = verified(checkpoint, grid)
    if manifest is None:
        raise CheckpointError(
            f"model.megatron_path: {checkpoint}: {fault}; convert model.path anew (tools/convert_checkpoint.py), or "
            "name a checkpoints/step-N of a run"
        )
    _check_model(checkpoint, manifest, model_path, config)
    parameters = named_parameters(chunks)
    keep_buffers_wide(parameters)
    tree = {
        name: _tensors(unwrapped(chunk).sharded_state_dict(metadata=sharding_metadata()))  # type: ignore[operator]
        for name, chunk in zip(model_names(chunks), chunks, strict=True)
    }
    _check_keys(checkpoint, {each.key for part in tree.values() for each in part.values()})
    loaded = dist_checkpointing.load(tree, str(checkpoint))
    found = {
        (name + "." if len(chunks) > 1 else "") + key: tensor
        for name, part in loaded.items()
        if name in tree
        for key, tensor in part.items()
    }
    if missing := parameters.keys() - found.keys():
        raise CheckpointError(f"model.megatron_path: {checkpoint} fills all but {some_names(missing)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found[name])


def _check_keys(checkpoint: Path, asked: set[str]) -> None:
    """On every rank alike, or those that lack nothing would wait for the others."""
    there = {each.key for each in load_sharded_metadata(str(checkpoint)).values()}
    lacking: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(lacking, asked - there)
    if any(lacking):
        raise CheckpointError(f"model.megatron_path: {checkpoint} lacks {some_names(set().union(*lacking))}")


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without what layers keep beside their weights (scaling factors of FP8 products, which begin anew)."""
    return {name: each for name, each in state.items() if not isinstance(each, ShardedObject)}


def _check_model(checkpoint: Path, manifest: Manifest, model_path: Path, config: Mapping[str, Any]) -> None:
    told = checkpoint / directory.COMPANIONS
    if (told / "config.json").exists():
        if differing := differences(config, read_config(told)):
            raise CheckpointError(
                f"model.megatron_path: {checkpoint} is another model than model.path {model_path}: they differ in "
                f"{', '.join(differing)}"
            )
        return
    trained_from = manifest.identity.get(directory.CONFIG_IDENTITY)
    if trained_from is not None and directory.entry_of(model_path / "config.json").digest != trained_from:
        raise CheckpointError(
            f"model.megatron_path: {checkpoint} is of a run whose model.path had another config.json than {model_path}"
        )
