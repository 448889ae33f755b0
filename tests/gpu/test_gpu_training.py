"""Training on a GPU: the same numbers as on the CPU, and the libraries that only a GPU machine has."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu_process import in_process, in_processes, needs_gpus, needs_library, needs_transformer_engine

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

import tiny
from machine_steps import STEPS, Report, Variant, prepare, reports, train

from slimerl.spec.schema import ParallelSpec

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

FLOAT32 = 1e-4
"""Relative; the same sums in another order, three steps of Adam."""
BFLOAT16 = 3e-2


FLOAT = Variant()
FUSED = Variant("bf16")
PORTABLE = Variant("bf16", transformer_engine=False)
RECOMPUTED = Variant("bf16", recompute="full")


MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")
VARIANTS = (FLOAT, PORTABLE, FUSED, RECOMPUTED)


@dataclass(frozen=True)
class Results:
    """Of one model: by variant on the GPU, and in float32 on the CPU; of what raised, its traceback."""

    gpu: dict[Variant, Report | str]
    cpu: Report | str

    def on_gpu(self, variant: Variant) -> Report:
        return succeeded(self.gpu[variant])


def succeeded(report: Report | str) -> Report:
    if isinstance(report, str):
        pytest.fail(report)
    return report


@pytest.fixture(scope="module")
def of_all_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """One process on the GPU and one that sees none, at once."""
    paths = [tmp_path_factory.mktemp(kind) for kind in MODELS]
    for kind, path in zip(MODELS, paths, strict=True):
        # kernels take head sizes that are multiples of 8
        tiny.write_model(path, kind, **({"v_head_dim": 16} if kind == "deepseek_v3" else {}))
    on_gpu = [(path, variant) for path in paths for variant in VARIANTS]
    on_cpu = [(path, FLOAT) for path in paths]
    gpu, cpu = in_processes([(reports, (on_gpu,)), (reports, (on_cpu,))], gpus=["0", ""])
    of_gpu = dict(zip(on_gpu, gpu, strict=True))
    return {
        kind: Results({variant: of_gpu[path, variant] for variant in VARIANTS}, of_cpu)
        for kind, path, of_cpu in zip(MODELS, paths, cpu, strict=True)
    }


@pytest.fixture(params=MODELS)
def results(request: pytest.FixtureRequest, of_all_models: dict[str, Results]) -> Results:
    return of_all_models[request.param]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    tiny.write_model(path, "qwen3")
    return path


def assert_figures_agree(found: Report, wanted: Report, tolerance: float) -> None:
    assert len(found.figures) == len(wanted.figures) == STEPS
    for one, other in zip(found.figures, wanted.figures, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


def test_steps_on_the_gpu_give_the_cpus_loss_gradient_norm_and_weights(results: Results) -> None:
    gpu = results.on_gpu(FLOAT)
    cpu = succeeded(results.cpu)
    assert_figures_agree(gpu, cpu, FLOAT32)
    torch.testing.assert_close(gpu.logprobs, cpu.logprobs, rtol=FLOAT32, atol=FLOAT32)
    for name, tensor in cpu.weights.items():
        torch.testing.assert_close(gpu.weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@needs_transformer_engine
def test_transformer_engine_trains_as_the_portable_modules_do(results: Results) -> None:
    assert_figures_agree(results.on_gpu(FUSED), results.on_gpu(PORTABLE), BFLOAT16)


@needs_transformer_engine
def test_thd_attention_of_transformer_engine_gives_the_log_probabilities_of_torchs(results: Results) -> None:
    fused, portable = results.on_gpu(FUSED), results.on_gpu(PORTABLE)
    assert "TEDotProductAttention" in fused.modules
    assert "SdpaAttention" in portable.modules
    assert (fused.logprobs - portable.logprobs).abs().mean() < BFLOAT16


@needs_transformer_engine
def test_transformer_engines_fused_adam_is_taken_where_it_is_installed(results: Results) -> None:
    assert results.on_gpu(FUSED).adam.startswith("transformer_engine.pytorch.optimizers")


def test_recomputed_layers_give_the_same_gradient(results: Results) -> None:
    assert_figures_agree(results.on_gpu(RECOMPUTED), results.on_gpu(FUSED), BFLOAT16)


def fused_by_torch(model_path: Path) -> list[bool]:
    """Without the libraries Megatron builds torch's AdamW; here it is put there as if they were missing."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    from slimerl.training.fused_adam import inner_optimizers

    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    distrib_optimizer.Adam = torch.optim.AdamW
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = False
    machine = prepare(model_path, ParallelSpec(), Variant("bf16"))
    machine.trainer.step(machine.packs(0))
    return [group["fused"] for inner in inner_optimizers(machine.optimizer) for group in inner.param_groups]


def test_without_a_library_torchs_adam_is_fused(dense: Path) -> None:
    groups = in_process(fused_by_torch, dense, gpu=True)
    assert groups
    assert all(groups)


@needs_library("fused_weight_gradient_mlp_cuda", "NVIDIA's apex, built from source (requirements-gpu.txt)")
@needs_transformer_engine
def test_apex_adds_weight_gradients_in_float32(dense: Path) -> None:
    figures, _ = in_process(train, dense, ParallelSpec(), FUSED, gpu=True)
    assert all(math.isfinite(step["train/grad_norm"]) for step in figures)
