"""Command line and environment of a server: pure values, for both kinds of machine."""

import os
import socket
from pathlib import Path

import pytest
from engine_fixtures import engine_spec

from slimerl.engine.launcher import Device, server_arguments, server_environment
from slimerl.engine.local_resources import PrivateDirectory, ReservedPort
from slimerl.training.gpu_environment import gpu_environment


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_both_devices_serve_the_specs_model_on_the_loopback_interface_alone() -> None:
    spec = engine_spec(Path("/models/m"), Path("/runs/r"), tensor_parallel=2)
    for device in Device:
        arguments = server_arguments(spec, 1, device, 20_123)
        assert value_of(arguments, "--model-path") == "/models/m"
        assert value_of(arguments, "--host") == "127.0.0.1"
        assert value_of(arguments, "--port") == "20123"
        assert value_of(arguments, "--tp-size") == "2"
        assert value_of(arguments, "--dtype") == "float32"
        assert value_of(arguments, "--context-length") == str(spec.engine.context_tokens)
        assert value_of(arguments, "--custom-weight-loader") == "slimerl.engine.inside.loader.receive"
        assert "--weight-version=-1" in arguments
        assert "--sleep-on-idle" in arguments


def test_a_gpu_gets_no_flag_of_the_cpu_and_the_second_engine_its_own_gpus() -> None:
    spec = engine_spec(Path("/models/m"), Path("/runs/r"), tensor_parallel=2)
    gpu, cpu = (server_arguments(spec, 1, device, 20_123) for device in (Device.CUDA, Device.CPU))
    for option in ("--device", "--cuda-graph-backend-decode", "--mem-fraction-static"):
        assert option in cpu
        assert option not in gpu
    assert value_of(gpu, "--base-gpu-id") == "2"
    assert "--enable-deterministic-inference" in gpu
    assert "--enable-deterministic-inference" not in cpu


def test_a_gpu_engine_is_deterministic_and_its_attention_backend_can_be_so_in_the_models_dtype() -> None:
    """SGLang chooses among the backends that can; in float32 only one of them is left."""
    fp32 = engine_spec(Path("/models/m"), Path("/runs/r"))
    bf16 = fp32.model_copy(update={"model": fp32.model.model_copy(update={"dtype": "bf16"})})
    assert value_of(server_arguments(fp32, 0, Device.CUDA, 1), "--attention-backend") == "triton"
    assert "--attention-backend" not in server_arguments(bf16, 0, Device.CUDA, 1)


def test_engine_and_trainer_set_up_nccl_alike_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = engine_spec(Path("/m"), Path("/r"))
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    gpu, cpu = (server_environment(spec, device, "key", Path("/p")) for device in (Device.CUDA, Device.CPU))
    assert gpu["NCCL_CUMEM_ENABLE"] == gpu_environment(spec.training.parallel)["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_CUMEM_ENABLE" not in cpu
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert server_environment(spec, Device.CUDA, "key", Path("/p"))["NCCL_CUMEM_ENABLE"] == "1"


def test_extra_arguments_come_last() -> None:
    spec = engine_spec(Path("/m"), Path("/r"), extra_args=("--dtype", "bfloat16"))
    assert server_arguments(spec, 0, Device.CPU, 1)[-2:] == ["--dtype", "bfloat16"]


def test_the_key_travels_in_the_environment_and_the_shim_only_without_cuda() -> None:
    spec = engine_spec(Path("/m"), Path("/r"), tensor_parallel=2, threads=3)
    cpu = server_environment(spec, Device.CPU, "secret", Path("/private"))
    gpu = server_environment(spec, Device.CUDA, "secret", Path("/private"))
    assert cpu["SLIMERL_ENGINE_KEY"] == gpu["SLIMERL_ENGINE_KEY"] == "secret"
    assert "secret" not in " ".join(server_arguments(spec, 0, Device.CPU, 1))
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert not gpu.keys() & {"SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND"}


def test_two_engines_that_start_at_once_never_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has not bound its port yet when the second chooses."""
    monkeypatch.setattr("slimerl.engine.local_resources._PORTS", range(20_000, 20_040))
    ports = [ReservedPort() for _ in range(20)]
    try:
        assert len({port.number for port in ports}) == 20
    finally:
        for port in ports:
            port.release()


def test_a_port_that_somebody_listens_on_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        free = taken + 1
        monkeypatch.setattr("slimerl.engine.local_resources._PORTS", range(taken, free + 1))
        port = ReservedPort()
        port.release()
    assert port.number == free


def test_a_private_directory_is_the_owners_alone_and_goes_with_all_it_holds() -> None:
    directory = PrivateDirectory("test")
    (directory.path / "inner").mkdir()
    (directory.path / "inner" / "file").write_text("x")
    assert os.stat(directory.path).st_mode & 0o077 == 0
    directory.remove()
    assert not directory.path.exists()
