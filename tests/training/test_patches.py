"""Patches of megatron-core change nothing where CUDA is present, and each does change something where it is not."""

import subprocess
import sys

import pytest
import tiny
import torch

from slimerl.spec.schema import ParallelSpec

PROGRAM = """
import importlib, warnings
warnings.simplefilter("ignore")
import torch, torch._dynamo
import megatron_patches
from megatron_patches import device
from megatron_patches.registry import PATCHES

def state():
    "Everything that any patch assigns."
    found = {("torch.cuda", name): value for name, value in vars(torch.cuda).items() if not name.startswith("__")}
    found["Tensor.cuda"], found["Module.cuda"] = torch.Tensor.cuda, torch.nn.Module.cuda
    found["Tensor.type"] = torch.Tensor.type
    found["compile"] = torch.compile
    found["wrapped already"] = torch._dynamo.config.disable
    for name in device.MODULES_WITH_LITERAL_CUDA:
        found[name] = importlib.import_module(name).torch
    for name in ("megatron.core.tensor_parallel.random", "megatron.core.optimizer",
                 "megatron.core.optimizer.distrib_optimizer", "megatron.core.models.common.embeddings.rope_utils",
                 "megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.token_dispatcher",
                 "megatron.core.transformer.multi_latent_attention", "megatron.core.tensor_parallel.mappings"):
        found |= {(name, key): value for key, value in vars(importlib.import_module(name)).items()
                  if not key.startswith("__") and type(value).__name__ != "module"}
    return found

def changed(before):
    after = state()
    return [key for key in before if before[key] is not after.get(key)]

really = torch.cuda.is_available
torch.cuda.is_available = lambda: True
before = state()
megatron_patches.apply()
for patch in PATCHES:
    patch()
assert changed(before) == [], f"changed under CUDA: {changed(before)}"

torch.cuda.is_available = really
for patch in PATCHES:
    before = state()
    patch()
    assert changed(before), f"{patch.__name__} changes nothing"
    before = state()
    patch()
    assert changed(before) == [], f"{patch.__name__} is not idempotent"
print("patches:", len(PATCHES))
"""


def test_every_patch_is_a_no_op_under_cuda_and_idempotent_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "patches: 11"


def test_every_patch_says_why_and_for_which_version():
    from megatron_patches.registry import MEGATRON_VERSIONS, PATCHES

    for patch in PATCHES:
        assert any(f"megatron-core {version}" in (patch.__doc__ or "") for version in MEGATRON_VERSIONS), patch.__name__


def test_an_untried_version_of_megatron_is_refused(monkeypatch):
    from megatron_patches import registry

    monkeypatch.setattr(registry, "MEGATRON_VERSIONS", ("0.15.0",))
    with pytest.raises(registry.UnknownMegatronVersion, match=r"0\.15\.0, found 0\.16\.1"):
        registry.apply()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_the_layers_are_transformer_engines(tmp_path, monkeypatch):
    from slimerl.training import parallel

    tiny.write_model(tmp_path, "qwen3")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        layer = tiny.build(tmp_path, ParallelSpec(), "bf16").chunks[0].module.decoder.layers[0]
        assert type(layer.self_attention.core_attention).__name__ == "TEDotProductAttention"
    finally:
        parallel.stop()
