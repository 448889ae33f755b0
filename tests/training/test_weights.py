"""Hugging Face → Megatron → Hugging Face loses nothing."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from slimerl.resharding.families import Form, family_of
from slimerl.resharding.hf_checkpoint import read_config
from slimerl.spec.schema import AlgorithmSpec, OptimizerSpec, ParallelSpec

DENSE = {
    "one process": ParallelSpec(),
    "TP2": ParallelSpec(tensor=2),
    "TP2xDP2": ParallelSpec(tensor=2, data=2),
    "PP2, uneven": ParallelSpec(pipeline=2, pipeline_layout="Et|ttL"),
    "PP3": ParallelSpec(pipeline=3),
    "PP2xVPP2, uneven": ParallelSpec(pipeline=2, virtual=2, pipeline_layout="E|t|t|tL"),
}
EXPERTS = {
    "one process": ParallelSpec(),
    "TP2": ParallelSpec(tensor=2, sequence_parallel=True),
    "TP2, experts whole": ParallelSpec(tensor=2, sequence_parallel=True, expert_tensor=1),
    "EP2": ParallelSpec(data=2, expert=2),
    "TP2xEP2": ParallelSpec(tensor=2, sequence_parallel=True, data=2, expert=2),
    "CP2xEP4": ParallelSpec(context=2, data=2, expert=4),
    "PP2, uneven": ParallelSpec(pipeline=2, pipeline_layout="Ett|tL"),
    "PP2xEP2": ParallelSpec(pipeline=2, data=2, expert=2, pipeline_layout="Et|ttL"),
}
CASES = [
    *(("llama", True, DENSE[grid]) for grid in DENSE),
    *(("qwen2", False, DENSE[grid]) for grid in ("one process", "TP2")),
    *(("qwen3", False, DENSE[grid]) for grid in ("one process", "TP2", "PP2, uneven")),
    *(("qwen3_moe", False, EXPERTS[grid]) for grid in ("one process", "TP2", "EP2", "TP2xEP2", "PP2, uneven")),
    *(("deepseek_v3", False, parallel) for parallel in EXPERTS.values()),
    ("glm4_moe", False, EXPERTS["TP2xEP2"]),
]


def told(case: object) -> str:
    if not isinstance(case, ParallelSpec):
        return str(case)
    given = case.model_dump(exclude_defaults=True).items()
    return ",".join(f"{key}={value}" for key, value in given) or "one process"


def load_and_export(model_path: Path, destination: Path, parallel: ParallelSpec, dtype: str) -> None:
    from slimerl.training.weights import export_weights

    built = tiny.build(model_path, parallel, dtype)
    # buckets smaller than one tensor: the gather's order and grouping must not matter
    export_weights(built.chunks, destination, model_path, built.map, built.grid, bucket_bytes=1000)


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def add_prediction_layer(directory: Path) -> set[str]:
    """Gives the checkpoint the multi-token-prediction layer that its config.json tells of, with copies of embedding
    and head as published checkpoints have them; transformers writes none. Returns the new names."""
    config = read_config(directory)
    family = family_of(config)
    tensors = all_tensors(directory)
    unused = family.unused_tensors(config)
    for tensor in family.logical_tensors(config, form=Form(prediction=True)):
        if tensor.name in unused:
            tensors[tensor.name] = torch.randn(tensor.shape, dtype=tensor.dtype)
    aliases = family.aliases(config)
    tensors |= {name: tensors[of].clone() for name, of in aliases.items()}
    save_file(tensors, directory / "model.safetensors")
    return unused | aliases.keys()


@pytest.mark.parametrize(("kind", "tied", "parallel"), CASES, ids=told)
def test_w10_the_round_trip_is_bit_exact_with_the_same_keys(ranks, tmp_path, kind, tied, parallel):
    tiny.write_model(tmp_path / "given", kind, tied)
    added = add_prediction_layer(tmp_path / "given") if kind in ("deepseek_v3", "glm4_moe") else set()
    assert bool(added) == (kind in ("deepseek_v3", "glm4_moe"))
    ranks.run(parallel.world_size, load_and_export, tmp_path / "given", tmp_path / "back", parallel, "fp32")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    assert back.keys() == given.keys() >= added
    assert [name for name in given if not torch.equal(given[name], back[name])] == []


def change_and_export(model_path: Path, destination: Path) -> None:
    from slimerl.training.weights import export_weights, named_parameters

    built = tiny.build(model_path, ParallelSpec())
    with torch.no_grad():
        for tensor in named_parameters(built.chunks).values():
            tensor.add_(1.0)
    export_weights(built.chunks, destination, model_path, built.map, built.grid)


def test_w8_after_training_copies_follow_their_tensor_and_the_prediction_layer_stays(ranks, tmp_path):
    """Fault: a checkpoint's second copy of the embedding or head is exported as it was loaded."""
    tiny.write_model(tmp_path / "given", "deepseek_v3")
    added = add_prediction_layer(tmp_path / "given")
    ranks.run(1, change_and_export, tmp_path / "given", tmp_path / "back")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    aliases = family_of(read_config(tmp_path / "given")).aliases(read_config(tmp_path / "given"))
    assert len(aliases) == 2
    for name, tensor in given.items():
        stays = name in added and name not in aliases
        assert torch.equal(back[name], tensor if stays else tensor + 1), name


def test_a_model_trained_in_bf16_is_exported_in_bf16(ranks, tmp_path):
    tiny.write_model(tmp_path / "given", "qwen3")
    ranks.run(1, load_and_export, tmp_path / "given", tmp_path / "back", ParallelSpec(), "bf16")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    assert all(torch.equal(given[name].bfloat16(), back[name]) for name in given)


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(ranks, tmp_path):
    from rank_pool import RankFailed

    tiny.write_model(tmp_path / "given", "llama", tied=True)
    tensors = all_tensors(tmp_path / "given")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "given" / "model.safetensors")
    with pytest.raises(RankFailed, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        ranks.run(1, load_and_export, tmp_path / "given", tmp_path / "back", ParallelSpec(), "fp32")


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_correction_bias_of_a_router_stays_in_fp32_in_a_bf16_model(ranks, tmp_path, kind):
    """Fault: Megatron's bf16 wrapper rounds the buffer before it is loaded."""
    tiny.write_model(tmp_path / "given", kind)
    ranks.run(1, load_and_export, tmp_path / "given", tmp_path / "back", ParallelSpec(), "bf16")
    given, back = all_tensors(tmp_path / "given"), all_tensors(tmp_path / "back")
    assert torch.equal(given[BIAS], back[BIAS])
    assert back[BIAS].dtype == torch.float32
    assert not torch.equal(given[BIAS], given[BIAS].bfloat16().float())
    assert {tensor.dtype for name, tensor in back.items() if not name.endswith("bias")} == {torch.bfloat16}


def bias_after_training(model_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(correction bias, router weight) after a step."""
    built = tiny.build(model_path, ParallelSpec())
    trainer = tiny.trainer(built, AlgorithmSpec(), OptimizerSpec(lr=1e-2), steps=1)
    trainer.step(tiny.micro_batches(tiny.random_step(0), built, 10_000))
    weights = tiny.collected(built)
    return weights[BIAS], weights[BIAS.replace("e_score_correction_bias", "weight")]


def test_training_moves_the_router_but_not_its_correction_bias(ranks, tmp_path):
    """Fault: Megatron nudges the bias of an expert that few tokens chose (moe_router_bias_update_rate)."""
    tiny.write_model(tmp_path, "deepseek_v3")
    given = all_tensors(tmp_path)
    [(bias, weight)] = ranks.run(1, bias_after_training, tmp_path)
    assert torch.equal(bias, given[BIAS])
    assert not torch.equal(weight, given[BIAS.replace("e_score_correction_bias", "weight")])
