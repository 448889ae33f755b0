"""Hugging Face → Megatron → Hugging Face loses nothing."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from slimerl.spec.schema import ParallelSpec

GRIDS = [ParallelSpec(), ParallelSpec(tensor=2), ParallelSpec(tensor=2, data=2)]


def load_and_export(model_path: Path, destination: Path, parallel: ParallelSpec, dtype: str) -> None:
    from slimerl.training.weights import export_weights

    built = tiny.build(model_path, parallel, dtype)
    # buckets smaller than one tensor: the gather's order and grouping must not matter
    export_weights(built.chunks, destination, model_path, built.map, built.grid, bucket_bytes=1000)


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("parallel", GRIDS, ids=lambda p: f"TP{p.tensor}xDP{p.data}")
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False)])
def test_w10_the_round_trip_is_bit_exact_with_the_same_keys(ranks, tmp_path, kind, tied, parallel):
    tiny.write_model(tmp_path / "given", kind, tied)
    ranks.run(parallel.world_size, load_and_export, tmp_path / "given", tmp_path / "back", parallel, "fp32")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    assert back.keys() == given.keys()
    assert [name for name in given if not torch.equal(given[name], back[name])] == []


def test_a_model_trained_in_bf16_is_exported_in_bf16(ranks, tmp_path):
    tiny.write_model(tmp_path / "given", "qwen3")
    ranks.run(1, load_and_export, tmp_path / "given", tmp_path / "back", ParallelSpec(), "bf16")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    assert all(torch.equal(given[name].bfloat16(), back[name]) for name in given)


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(ranks, tmp_path):
    from rank_pool import RankFailed
    from safetensors.torch import save_file

    tiny.write_model(tmp_path / "given", "llama", tied=True)
    tensors = all_tensors(tmp_path / "given")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "given" / "model.safetensors")
    with pytest.raises(RankFailed, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        ranks.run(1, load_and_export, tmp_path / "given", tmp_path / "back", ParallelSpec(), "fp32")
