"""Engines that start from a quantised copy of the model: what is wrong with it is told before anything starts."""

import json
import shutil

import pytest
import torch
from preflight_home import change, check
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from slimerl.resharding.families import BlockScales, Form, family_of
from slimerl.resharding.quantise import on_the_wire

BLOCK = 16
QUANTISATION = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


@pytest.fixture
def quantised(home):
    """`home` with a DeepSeek model, and its FP8 copy in `fp8`."""
    shutil.rmtree(home / "model")
    make_tiny_model("deepseek_v3", home / "model")
    shutil.copytree(home / "model", home / "fp8")
    config, scales = json.loads((home / "model" / "config.json").read_text()), BlockScales(BLOCK)
    planned = family_of(config).logical_tensors(config, torch.float32, Form(scales=scales))
    state = load_file(home / "model" / "model.safetensors")
    by_name = {tensor.name: tensor for tensor in planned}
    save_file(dict(on_the_wire(state.items(), by_name, scales)), home / "fp8" / "model.safetensors")
    change(home / "fp8" / "config.json", quantization_config=QUANTISATION)
    return home


def test_a_quantised_copy_of_the_model_is_taken(quantised):
    assert check(quantised, "engine.model_path=fp8") == (0, [])


def test_s3_a_quantised_copy_without_one_of_its_scales_is_refused(quantised):
    """Injected: the scales of one matrix are missing."""
    file = quantised / "fp8" / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(state, file)
    code, [line] = check(quantised, "engine.model_path=fp8")
    assert code == 2
    assert line.startswith("engine.model_path: ")
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv" in line


def test_s3_a_quantised_copy_of_another_model_is_refused(quantised):
    """Injected: another scaling of the experts' weights; every shape is the same."""
    change(quantised / "fp8" / "config.json", routed_scaling_factor=3.5)
    assert check(quantised, "engine.model_path=fp8") == (
        2,
        [
            "engine.model_path: fp8 is another model than model.path: they differ in moe_router_topk_scaling_factor; "
            "name the same model, quantised"
        ],
    )


def test_s3_a_format_that_the_sync_cannot_send_is_refused(quantised):
    """Injected: one scale for each row."""
    change(quantised / "fp8" / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    code, [line] = check(quantised, "engine.model_path=fp8")
    assert code == 2
    assert line.startswith("engine.model_path: fp8: config.json: quantization_config = ")
    assert "is not FP8 in square blocks" in line


def test_s3_the_trainer_itself_takes_no_quantised_checkpoint(quantised):
    """Injected: model.path and engine.model_path exchanged."""
    code, [line] = check(quantised, "model.path=fp8", "engine.model_path=model")
    assert code == 2
    assert "training needs the weights in bf16 or fp32" in line
