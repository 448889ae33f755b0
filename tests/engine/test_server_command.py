"""Command line and environment of a server: pure values, for both kinds of machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_fixtures import engine_spec

from slimerl.engine.__main__ import main as engine_role
from slimerl.engine.launcher import Device, Place, server_arguments, server_environment
from slimerl.engine.local_resources import NoAddress, PrivateDirectory, ReservedPort, own_address
from slimerl.resilience.failure_kinds import UNUSABLE_INPUT
from slimerl.spec import RunSpec
from slimerl.spec.load import dump_spec
from slimerl.spec.schema import ParallelSpec
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


def changed(spec: RunSpec, section: str, **values: Any) -> RunSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})


def test_engines_apart_from_the_trainer_begin_behind_its_gpus_and_count_on_each_node_from_nought() -> None:
    spec = engine_spec(Path("/m"), Path("/r"), tensor_parallel=2, replicas=6)
    apart = changed(spec, "cluster", placement="disaggregated")
    apart = changed(apart, "training", parallel=ParallelSpec(data=4))

    def first_gpus(spec: RunSpec) -> list[int]:
        return [int(value_of(server_arguments(spec, i, Device.CUDA, 1), "--base-gpu-id")) for i in range(6)]

    assert first_gpus(spec) == [0, 2, 4, 6, 0, 2]
    assert first_gpus(apart) == [4, 6, 0, 2, 4, 6]


def test_an_engine_on_several_machines_is_told_which_this_is_and_where_they_meet() -> None:
    spec = changed(engine_spec(Path("/m"), Path("/r"), tensor_parallel=16), "cluster", gpus_per_node=8)
    place = Place("10.0.0.6", node=1, head="10.0.0.5")
    arguments = server_arguments(spec, 3, Device.CUDA, 20_123, place)
    assert value_of(arguments, "--nnodes") == "2"
    assert value_of(arguments, "--node-rank") == "1"
    assert value_of(arguments, "--dist-init-addr") == "10.0.0.5:19999"
    assert value_of(arguments, "--host") == "10.0.0.6"
    assert value_of(arguments, "--base-gpu-id") == "0"
    assert "--nnodes" not in server_arguments(changed(spec, "cluster", gpus_per_node=16), 3, Device.CUDA, 20_123)


def test_roles_listen_on_the_loopback_interface_unless_others_must_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: a name without address, and one that stands for this machine alone, as Debian's installer writes it."""
    assert own_address("loopback") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(NoAddress, match=r"localhost has the address 127\.0\.0\.1, which other machines cannot reach"):
        own_address("hostname")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-machine.invalid")
    with pytest.raises(NoAddress, match="has no address"):
        own_address("hostname")
    monkeypatch.setattr(socket, "gethostname", lambda: "10.1.2.3")
    assert own_address("hostname") == "10.1.2.3"


def test_an_engine_can_give_its_memory_up_where_it_shares_a_gpu_with_the_trainer_and_only_there() -> None:
    shared = engine_spec(Path("/m"), Path("/r"))
    apart = changed(shared, "cluster", placement="disaggregated")
    assert "--enable-memory-saver" in server_arguments(shared, 0, Device.CUDA, 1)
    assert "--enable-memory-saver" not in server_arguments(apart, 0, Device.CUDA, 1)
    assert "--enable-memory-saver" not in server_arguments(shared, 0, Device.CPU, 1)


def test_sglang_is_told_the_layout_that_the_sync_plans_for() -> None:
    """Experts over GPUs, attention in groups, other MLPs whole, the shared expert apart; nothing of it on a plain one.

    Read by SGLang's own parser, which refuses an argument that it does not know.
    """
    plain = engine_spec(Path("/m"), Path("/r"), tensor_parallel=8)
    sizes = {"expert_parallel": 8, "data_parallel_attention": 4, "replicated_mlp": True, "model_path": Path("/fp8")}
    spread = changed(plain, "engine", **sizes)
    command = [sys.executable, "-c", PARSE, *server_arguments(spread, 0, Device.CUDA, 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "tp_size": 8,
        "ep_size": 8,
        "attn_dp_size": 4,
        "moe_dense_tp_size": 1,
        "disable_shared_experts_fusion": True,
        "enable_memory_saver": True,
        "model_path": "/fp8",
    }
    assert server_environment(spread, Device.CUDA, "key", Path("/p"))["SGLANG_SHARED_EXPERT_TP1"] == "1"
    assert "SGLANG_SHARED_EXPERT_TP1" not in server_environment(plain, Device.CUDA, "key", Path("/p"))
    assert not {"--ep-size", "--attn-dp-size", "--moe-dense-tp-size"} & set(server_arguments(plain, 0, Device.CPU, 1))


PARSE = """
import argparse, json, os, sys
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from slimerl.engine.inside.cpu_shim import install
install()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found = parser.parse_args(sys.argv[1:])
names = ("tp_size", "ep_size", "attn_dp_size", "moe_dense_tp_size", "disable_shared_experts_fusion", "model_path",
         "enable_memory_saver")
print(json.dumps({name: getattr(found, name) for name in names}))
"""


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
    assert "LRU_CACHE_CAPACITY" in cpu
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
        # of those behind it others may hold some
        monkeypatch.setattr("slimerl.engine.local_resources._PORTS", range(taken, taken + 50))
        port = ReservedPort()
        port.release()
    assert taken < port.number < taken + 50


def test_a_private_directory_is_the_owners_alone_and_goes_with_all_it_holds() -> None:
    directory = PrivateDirectory("test")
    (directory.path / "inner").mkdir()
    (directory.path / "inner" / "file").write_text("x")
    assert os.stat(directory.path).st_mode & 0o077 == 0
    directory.remove()
    assert not directory.path.exists()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (["--index", "5"], "--index 5: engine.replicas has engines 0 to 1; choose one of them"),
        (["--index", "-1"], "--index -1: engine.replicas has engines 0 to 1; choose one of them"),
        (["--index", "0", "--node", "1"], "--node 1: an engine has machines 0 to 0; choose one of them"),
        (["--index", "0", "algorithm.name=sft"], "algorithm sft reads its responses from the data; it has no engines"),
    ],
)
def test_a_role_that_the_spec_does_not_have_starts_no_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: list[str], told: str
) -> None:
    tree = yaml.safe_load(dump_spec(engine_spec(tmp_path / "model", tmp_path / "run", replicas=2)))
    # with the options of its own algorithm it could be of no other
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({key: tree[key] for key in tree if key != "algorithm"}))
    assert engine_role([str(tmp_path / "spec.yaml"), *place]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path}/spec.yaml: {told}")
    assert not (tmp_path / "run").exists()


def test_an_engine_whose_spec_cannot_be_used_ends_like_every_role_with_bad_input(tmp_path):
    """Not to be started again: the next start would read the same."""
    assert engine_role([str(tmp_path / "none.yaml"), "--index", "0"]) == UNUSABLE_INPUT
