"""Checkpoints go to Megatron's format and back without a change, and trainers of any layout start from them."""

import pytest
import torch
from converted_models import (
    KINDS,
    PREDICTING,
    all_tensors,
    assert_same,
    compare_starts,
    export_of,
    keys_of_megatron,
    keys_of_trainer,
    save_trained,
    write_checkpoint,
    write_files,
    write_in_fp8,
)

from slimerl.conversion.convert import Options, convert
from slimerl.conversion.torch_format import read_index
from slimerl.resharding.hf_checkpoint import CheckpointError, read_config
from slimerl.spec.schema import ParallelSpec

SMALL_FILES = Options(shard_bytes=60_000)
LAYOUTS = {
    "TP2": ParallelSpec(tensor=2, sequence_parallel=True),
    "PP2": ParallelSpec(pipeline=2, pipeline_layout="Et|ttL"),
    "TP2xEP2": ParallelSpec(tensor=2, sequence_parallel=True, data=2, expert=2),
    "PP2xVPP2": ParallelSpec(pipeline=2, virtual=2, pipeline_layout="E|t|t|tL"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_w10_a_conversion_there_and_back_is_bit_exact_with_the_same_keys(tmp_path, kind):
    """Fault: a tensor, a copy of one, or the prediction layer is lost, widened or changed on the way."""
    write_checkpoint(tmp_path / "given", kind, files=3)
    there = convert(tmp_path / "given", tmp_path / "megatron", SMALL_FILES)
    back = convert(tmp_path / "megatron", tmp_path / "back", Options(shard_bytes=100_000))
    assert there.files > 2
    assert back.files > 2
    assert back.digest == there.digest
    assert_same(tmp_path / "given", tmp_path / "back")
    assert any(name.startswith("model.layers.3.") for name in all_tensors(tmp_path / "back")) == (kind in PREDICTING)
    assert read_config(tmp_path / "back") == read_config(tmp_path / "given")
    assert (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_checkpoint_has_the_tensors_that_a_trainer_saves(ranks, tmp_path, kind):
    model = write_checkpoint(tmp_path / "given", kind)
    convert(model, tmp_path / "megatron")
    [wanted] = ranks.run(1, keys_of_trainer, model)
    there = {key: tuple(entry.size) for key, entry in read_index(tmp_path / "megatron").state_dict_metadata.items()}
    assert wanted == {key: there[key] for key in wanted}


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_the_prediction_layer_has_the_keys_that_megatrons_own_model_asks_for(ranks, tmp_path, kind):
    model = write_checkpoint(tmp_path / "given", kind)
    convert(model, tmp_path / "megatron")
    config = {"head_dim": 16} | read_config(model)
    [wanted] = ranks.run(1, keys_of_megatron, config)
    there = {key: tuple(entry.size) for key, entry in read_index(tmp_path / "megatron").state_dict_metadata.items()}
    assert wanted == {key: there[key] for key in wanted}
    assert any(key.startswith("mtp.layers.0.transformer_layer.mlp.experts.") for key in wanted)


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        ("llama", "TP2", "bf16"),
        ("llama", "PP2", "fp32"),
        ("llama", "PP2xVPP2", "bf16"),
        ("qwen2", "TP2", "bf16"),
        ("qwen3", "PP2", "bf16"),
        ("qwen3_moe", "TP2xEP2", "bf16"),
        ("glm4_moe", "PP2", "bf16"),
        ("deepseek_v3", "TP2", "bf16"),
        ("deepseek_v3", "TP2xEP2", "fp32"),
        ("kimi_k2", "PP2", "bf16"),
    ],
)
def test_c3_a_trainer_starts_from_it_as_from_the_hugging_face_checkpoint(ranks, tmp_path, kind, layout, dtype):
    """Fault: a rank of some layout finds other numbers in the distributed checkpoint, or none."""
    model, parallel = write_checkpoint(tmp_path / "given", kind), LAYOUTS[layout]
    convert(model, tmp_path / "megatron", SMALL_FILES)
    found = ranks.run(parallel.world_size, compare_starts, model, tmp_path / "megatron", parallel, dtype)
    assert found == [[]] * parallel.world_size


@pytest.mark.parametrize(("kind", "layout"), [("llama", "TP2"), ("deepseek_v3", "TP2xEP2"), ("qwen3", "PP2")])
def test_c3_what_a_run_saved_becomes_the_checkpoint_that_its_trainer_would_export(ranks, tmp_path, kind, layout):
    """Fault: parts of several ranks are put together in another order than the export does."""
    model, parallel = write_checkpoint(tmp_path / "given", kind, torch.float32), LAYOUTS[layout]
    ranks.run(parallel.world_size, save_trained, model, tmp_path, parallel)
    ranks.run(parallel.world_size, export_of, model, tmp_path, tmp_path / "exported", parallel)
    convert(tmp_path / "step-1", tmp_path / "converted", Options(like=model))
    assert_same(tmp_path / "exported", tmp_path / "converted")
    changed, given = all_tensors(tmp_path / "converted"), all_tensors(model)
    assert not torch.equal(changed["model.norm.weight"], given["model.norm.weight"])


def test_c3_a_new_run_of_another_layout_starts_from_what_a_run_saved(ranks, tmp_path):
    model = write_checkpoint(tmp_path / "given", "qwen3", torch.float32)
    ranks.run(2, save_trained, model, tmp_path, LAYOUTS["TP2"])
    convert(tmp_path / "step-1", tmp_path / "converted", Options(like=model))
    found = ranks.run(2, compare_starts, tmp_path / "converted", tmp_path / "step-1", LAYOUTS["PP2"], "fp32")
    assert found == [[], []]


def test_a_trainer_does_not_start_from_a_checkpoint_of_another_model(ranks, tmp_path):
    from rank_pool import RankFailed

    convert(write_checkpoint(tmp_path / "given", "qwen3"), tmp_path / "megatron")
    other = write_checkpoint(tmp_path / "other", "qwen2")
    with pytest.raises(RankFailed, match=r"is another model than model\.path .*qk_layernorm"):
        ranks.run(1, compare_starts, other, tmp_path / "megatron", ParallelSpec(), "bf16")


def test_c2_a_trainer_does_not_start_from_a_damaged_checkpoint(ranks, tmp_path):
    """Fault: one bit of a weight is not what was converted."""
    from rank_pool import RankFailed

    model = write_checkpoint(tmp_path / "given", "qwen3")
    convert(model, tmp_path / "megatron")
    file = tmp_path / "megatron" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RankFailed, match=r"megatron_path.*content of __0_0.distcp has changed"):
        ranks.run(1, compare_starts, model, tmp_path / "megatron", ParallelSpec(), "bf16")


@pytest.mark.parametrize(("block", "band_bytes"), [(16, 2**21), (16, 3000), (512, 3000)])
def test_a_checkpoint_in_fp8_blocks_comes_out_in_the_dtype_of_its_config(tmp_path, monkeypatch, block, band_bytes):
    """Fault: bands that end inside a block, and blocks that are larger than a band."""
    from slimerl.conversion import stream

    monkeypatch.setattr(stream, "BAND_BYTES", band_bytes)
    model = write_checkpoint(tmp_path / "plain", "deepseek_v3", intermediate_size=640)
    expected = write_in_fp8(model, block)
    convert(model, tmp_path / "megatron", SMALL_FILES)
    convert(tmp_path / "megatron", tmp_path / "back")
    back = all_tensors(tmp_path / "back")
    assert back.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(back[name], expected[name])] == []
    assert "quantization_config" not in read_config(tmp_path / "back")


def test_a_source_whose_fused_tensors_have_two_dtypes_is_refused_by_name(tmp_path):
    model = write_checkpoint(tmp_path / "given", "qwen3")
    tensors = all_tensors(model)
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].float()
    write_files(model, tensors, files=1)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight.* in one tensor"):
        convert(model, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
