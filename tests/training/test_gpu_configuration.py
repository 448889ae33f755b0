"""What a GPU machine asks of Megatron and SGLang, compared with files that a person can read.

After a wanted change: `python tests/training/test_gpu_configuration.py` writes the files anew; read the difference.
"""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from configuration_subject import CASES, MODELS  # noqa: E402

from slimerl.training.capabilities import Capabilities  # noqa: E402
from slimerl.training.gpu_environment import gpu_environment, set_gpu_environment  # noqa: E402
from slimerl.training.machine_arguments import data_parallel_arguments, machine_arguments  # noqa: E402

GOLDENS = HERE / "goldens"


def texts(cases: list[str]) -> dict[str, str]:
    """From a process of its own, see `configuration_subject.py`."""
    root = HERE.parent.parent
    run = subprocess.run(
        [sys.executable, str(HERE / "configuration_subject.py"), *cases],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "NCCL_CUMEM_ENABLE": "0"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def asked() -> dict[str, str]:
    return texts(CASES)


@pytest.mark.parametrize("case", CASES)
def test_configuration_is_the_one_that_was_agreed(asked: dict[str, str], case: str) -> None:
    golden = (GOLDENS / f"{case}.txt").read_text()
    difference = difflib.unified_diff(golden.splitlines(), asked[case].splitlines(), "agreed", "found", lineterm="")
    assert golden == asked[case], "\n".join(difference)


def test_there_is_no_file_without_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == set(CASES)


def test_no_fused_kernel_is_asked_for_on_a_cpu() -> None:
    for model in ({}, {"num_moe_experts": 4}, {"multi_latent_attention": True}):
        chosen = machine_arguments(model, Capabilities(cuda=False))
        assert chosen.pop("attention_backend").name == "local"
        assert chosen.pop("use_cpu_initialization")
        assert not any(chosen.values())


def test_latent_attention_without_yarn_has_no_fused_rotary_embedding() -> None:
    """Megatron refuses the combination."""
    here = Capabilities(cuda=True, transformer_engine=True)
    for kind, fused in (("yarn", True), ("rope", False)):
        latent = {"multi_latent_attention": True, "rope_type": kind}
        assert machine_arguments(latent, here)["apply_rope_fusion"] is fused


def test_transformer_engine_alone_does_not_fuse_weight_gradients() -> None:
    """Megatron's output layer, which is its own, raises when asked to without apex."""
    assert not Capabilities(cuda=True, transformer_engine=True).fuses_weight_gradients
    assert Capabilities(cuda=True, transformer_engine=True, apex=True).fuses_weight_gradients


def test_a_float32_model_does_without_transformer_engine() -> None:
    here = Capabilities(cuda=True, transformer_engine=True, apex=True)
    assert here.for_dtype("bf16") == here
    assert here.for_dtype("fp32") == Capabilities(cuda=True, transformer_engine=False, apex=True)


def test_gradient_reduction_overlaps_on_gpus_with_several_replicas_and_parameter_gathering_never() -> None:
    gpu, cpu = Capabilities(cuda=True), Capabilities(cuda=False)
    assert gpu.overlaps_reduction(2)
    assert not gpu.overlaps_reduction(1)
    assert not cpu.overlaps_reduction(2)
    assert not data_parallel_arguments(overlap=True)["overlap_param_gather"]


def test_environment_of_a_trainer_is_set_where_the_user_left_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from slimerl.spec.schema import ParallelSpec

    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in gpu_environment(ParallelSpec(data=2))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    set_gpu_environment(ParallelSpec(tensor=2))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_every_model_is_compared_on_both_kinds_of_machine() -> None:
    assert {f"{model}.{machine}" for model in MODELS for machine in ("cpu", "gpu")} <= set(CASES)


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for name, text in texts(CASES).items():
        (GOLDENS / f"{name}.txt").write_text(text)
