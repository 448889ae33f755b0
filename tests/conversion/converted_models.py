"""Tiny checkpoints of every family for the tests of conversion, and what runs on trainer ranks."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.families.scales import scale_name
from slimerl.resharding.hf_checkpoint import read_config
from slimerl.resharding.layouts import MegatronLayout
from slimerl.resharding.quantise import Quantised, dequantise, quantise
from slimerl.spec.schema import ParallelSpec

KINDS = [*tiny.KINDS, "kimi_k2"]
PREDICTING = ("glm4_moe", "deepseek_v3", "kimi_k2")


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_checkpoint(
    directory: Path, kind: str, dtype: torch.dtype = torch.bfloat16, files: int = 1, **changes: int
) -> Path:
    """A random checkpoint, with a prediction layer and second copies where published ones have them; `changes`: of its
    config.json."""
    tiny.write_model(directory, "deepseek_v3" if kind == "kimi_k2" else kind, tied=kind == "llama", **changes)
    config = read_config(directory)
    config |= {"model_type": kind, "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    tensors = {name: tensor.to(dtype) for name, tensor in all_tensors(directory).items()}
    if kind in PREDICTING:
        for tensor in family.checkpoint_tensors(config, form=Form(prediction=True)):
            tensors.setdefault(tensor.name, torch.randn(tensor.shape, dtype=tensor.dtype))
    tensors |= {name: tensors[of].clone() for name, of in family.aliases(config).items()}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    (directory / "tokenizer.json").write_text("{}")
    write_files(directory, tensors, files)
    return directory


def write_files(directory: Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in names[number::files]}, directory / file)
        weight_map |= dict.fromkeys(names[number::files], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_in_fp8(model: Path, block: int) -> dict[str, torch.Tensor]:
    """`write_checkpoint`'s in FP8 blocks, in place. What these are in the dtype of its config, by name."""
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    config = read_config(model) | {"quantization_config": quantization}
    scales, tensors = BlockScales(block), all_tensors(model)
    expected = dict(tensors)
    for tensor in family_of(config).logical_tensors(config, form=Form(prediction=True, scales=scales)):
        if tensor.dtype == torch.float8_e4m3fn:
            made = quantise(tensors[tensor.name], scales)
            tensors |= {tensor.name: made.data, scale_name(tensor.name): made.scales}
            expected[tensor.name] = dequantise(Quantised(*made), scales, torch.bfloat16)
    write_files(model, tensors, files=2)
    (model / "config.json").write_text(json.dumps(config))
    return expected


def contents(directory: Path) -> dict[str, bytes]:
    """Every file."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_same(given: Path, back: Path) -> None:
    """Key sets, dtypes and bits."""
    ours, theirs = all_tensors(given), all_tensors(back)
    assert ours.keys() == theirs.keys()
    differing = [
        name
        for name in ours
        if ours[name].dtype != theirs[name].dtype
        or not torch.equal(ours[name].contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
    ]
    assert differing == []


def compare_starts(model: Path, converted: Path, parallel: ParallelSpec, dtype: str) -> list[str]:
    """Parameters that differ between a start from the one and from the other; all are cleared between."""
    from slimerl.training.checkpoint.start import load_megatron_weights
    from slimerl.training.weights import named_parameters

    built = tiny.build(model, parallel, dtype)
    expected = {name: tensor.clone() for name, tensor in named_parameters(built.chunks).items()}
    with torch.no_grad():
        for tensor in named_parameters(built.chunks).values():
            tensor.fill_(7.0)
    load_megatron_weights(built.chunks, converted, model, read_config(model), built.grid)
    found = named_parameters(built.chunks)
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in found.items()
        if tensor.dtype != expected[name].dtype or not torch.equal(tensor, expected[name])
    ]


def save_trained(model: Path, root: Path, parallel: ParallelSpec) -> None:
    """A checkpoint as a run leaves it, after a step of training."""
    import checkpoint_ranks

    trained = checkpoint_ranks.Trained(model, parallel)
    trained.train(1, 1)
    checkpoint_ranks.finish(trained.begin_save(root, 1))


def export_of(model: Path, root: Path, destination: Path, parallel: ParallelSpec) -> None:
    """The export of the same weights by the trainer, of the run that `save_trained` saved."""
    import checkpoint_ranks

    from slimerl.training.weights import export_weights

    trained = checkpoint_ranks.Trained(model, parallel)
    trained.state.load(root / "step-1", 1, with_random=True)
    export_weights(trained.built.chunks, destination, model, trained.built.map, trained.built.grid)


def keys_of_trainer(model: Path) -> dict[str, tuple[int, ...]]:
    """Shape by key, of what a trainer of one rank saves."""
    from slimerl.training.model import unwrapped

    return _keys(unwrapped(tiny.build(model, ParallelSpec(), "bf16").chunks[0]))


def keys_of_megatron(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same of Megatron's own model, which has the prediction layer."""
    import megatron_models

    layout = MegatronLayout()
    with megatron_models.fake_ranks(), megatron_models.as_rank(0, layout):
        return _keys(megatron_models.build_chunks(config, layout)[""])


def _keys(model: Any) -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    tree = {"model": model.sharded_state_dict(metadata={"singleton_local_shards": False})}
    sharded, _ = save_preprocess(tree, validate_access_integrity=False)
    return {each.key: tuple(each.global_shape) for each in nested_values(sharded) if isinstance(each, ShardedTensor)}
