"""What this machine lacks for a run is told before it starts: room, ports, GPUs, memory, versions."""

import shutil
import socket
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from preflight_home import check

from slimerl.conductor.estimate import estimate
from slimerl.conductor.preflight import machine
from slimerl.conductor.preflight.model import ENGINE_ARGUMENTS, OWN_ARGUMENTS
from slimerl.conductor.versions import COPIES_PINS, ENGINE_PINS, TRAINER_PINS, version_fault
from slimerl.engine.launcher import Device, Place, server_arguments
from slimerl.engine.local_resources import NoAddress
from slimerl.spec import load_spec
from slimerl.training.capabilities import Capabilities
from slimerl.training.memory_estimate import GIB, EngineMemory, TrainerMemory
from slimerl.training.model_config import read_config

FULL_AND_READ_ONLY = """
import subprocess, sys
from typer.testing import CliRunner
from slimerl.cli import app

def mount(*options):
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", "there"], check=True)

mount("-o", "size=64k")
print(CliRunner().invoke(app, ["check", "spec.yaml", "output_dir=there/run"]).stderr, end="")
subprocess.run(["umount", "there"], check=True)
mount("-o", "ro")
print(CliRunner().invoke(app, ["check", "spec.yaml", "output_dir=there/run"]).stderr, end="")
"""


def test_c5_a_full_disk_and_a_read_only_one_are_told_before_the_run(home):
    """Injected: a real file system of 64 KiB, then one that is mounted read-only."""
    (home / "there").mkdir()
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: file systems cannot be mounted")
    done = subprocess.run(
        [unshare, "-Urm", sys.executable, "-c", FULL_AND_READ_ONLY],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, read_only = (line for line in done.stdout.splitlines() if line.startswith("output_dir"))
    assert full == (
        f"output_dir, training.export_path: the disk of {home}/there has 0.00 GiB free, the run writes up to 0.26 GiB; "
        "make room, set output_dir and training.export_path to another disk, or lower checkpoint.keep_last"
    )
    assert read_only == (
        f"output_dir: {home}/there is not writable (Read-only file system); set output_dir to a directory that is"
    )


def needs(home, *overrides):
    spec = load_spec(home / "spec.yaml", overrides)
    return spec, estimate(spec, read_config(home / "model"), Capabilities(cuda=False))


def test_s3_a_run_larger_than_the_memory_is_refused_with_its_parts(home):
    """Injected: a machine with 1 GiB."""
    spec, needed = needs(home, "training.parallel.data=2")
    [line] = machine.memory_faults(spec, needed, GIB)
    assert line.startswith(f"the run needs about {needed.host / GIB:.1f} GiB of memory (2 trainer ranks of ")
    assert "1.0 GiB are available" in line
    assert "lower training.micro_batch_tokens" in line
    assert not list(machine.memory_faults(spec, needed, needed.host))


def test_s3_every_trainer_and_every_engine_rank_wants_a_gpu_where_there_are_gpus(home):
    """Injected: a machine with one GPU, then with two and four."""
    spec, _ = needs(home, "training.parallel.data=2", "engine.replicas=2", "engine.tensor_parallel=2")
    assert list(machine.gpu_faults(spec, 1)) == [
        "training.parallel asks for 2 GPUs (tensor * context * pipeline * data), but 1 are visible; lower it, or set "
        "CUDA_VISIBLE_DEVICES",
        "engine.replicas * engine.tensor_parallel = 2 * 2 asks for 4 GPUs, but 1 are visible; lower one of them, or "
        "set CUDA_VISIBLE_DEVICES",
    ]
    assert len(list(machine.gpu_faults(spec, 2))) == 1
    assert not list(machine.gpu_faults(spec, 4))


def test_s3_engines_of_their_own_want_gpus_beside_the_trainers(home):
    """Injected: a machine with one GPU too few for both."""
    sizes = ("training.parallel.data=2", "engine.replicas=2", "cluster.placement=disaggregated")
    spec, needed = needs(home, *sizes)
    assert list(machine.gpu_faults(spec, 3)) == [
        "cluster.placement = disaggregated asks for 2 GPUs of the trainer and 2 of the engines, but 3 are visible; "
        "lower one of them, or set cluster.placement: colocated"
    ]
    assert not list(machine.gpu_faults(spec, 4))
    larger = max(needed.trainer.total, needed.engine.total)
    assert not list(machine.gpu_memory_faults(needed, larger, colocated=False))
    assert len(list(machine.gpu_memory_faults(needed, 1, colocated=False))) == 2
    # taking turns, each still keeps its process on the device
    assert len(list(machine.gpu_memory_faults(needed, larger, colocated=True))) >= 1


def test_s3_engines_that_may_come_want_gpus_from_the_beginning(home):
    """Injected: a machine with one GPU too few for the engines that may run at once."""
    sizes = ("cluster.placement=disaggregated", "training.steps=20", "engine.elastic.max=3")
    spec, _ = needs(home, *sizes)
    [line] = machine.gpu_faults(spec, 3)
    assert "1 GPUs of the trainer and 3 of the engines, but 3 are visible" in line
    assert not list(machine.gpu_faults(spec, 4))


def test_s3_a_model_larger_than_a_gpu_is_refused(home):
    """Injected: GPUs of a byte less than a trainer rank needs alone."""
    _, needed = needs(home)
    alone = replace(needed, engine=None)
    [line] = machine.gpu_memory_faults(alone, needed.trainer.total - 1)
    assert "training.recompute: full" in line
    assert not list(machine.gpu_memory_faults(alone, needed.trainer.total))


TRAINER = TrainerMemory(0, 1, weights=10, gradients=20, optimizer=40, activations=5, logits=4, runtime=1, reference=0)
ENGINE = EngineMemory(1, weights=10, kv_cache=50, workspace=2, runtime=1)


@pytest.mark.parametrize(
    ("moment", "trainer", "engine", "peak", "remedy"),
    [
        # 10 + 20 + 40 + 5 + 4 + 1 of the trainer, 2 + 1 of the engine
        ("training", TRAINER, ENGINE, 83, "training.recompute: full"),
        # 10 + 90 + 2 + 1 of the engine, 1 of the trainer
        ("generation", TRAINER, replace(ENGINE, kv_cache=90), 104, "engine.max_total_tokens"),
        # weights and processes of both, and 6 of buckets; of the rest next to nothing
        ("sync", replace(TRAINER, optimizer=0, gradients=0), replace(ENGINE, kv_cache=0), 30, "disaggregated"),
    ],
)
def test_s3_colocated_each_moment_of_a_step_must_fit_into_a_gpu(home, moment, trainer, engine, peak, remedy):
    """Injected: a GPU of one GiB less than what lies on it at the fullest moment; the sum of both roles never does."""
    _, needed = needs(home)
    needed = replace(needed, trainer=in_gib(trainer), engine=in_gib(engine), sync_buckets=6 * GIB)
    [line] = machine.gpu_memory_faults(needed, (peak - 1) * GIB)
    assert remedy in line, moment
    assert not list(machine.gpu_memory_faults(needed, peak * GIB))
    assert peak * GIB < needed.trainer.total + needed.engine.total


def in_gib(memory):
    sizes = {field.name: getattr(memory, field.name) * GIB for field in fields(memory) if field.name != "stage"}
    return replace(memory, **sizes)


def test_s3_shared_memory_too_small_for_the_sync_is_refused(home, monkeypatch):
    """Injected: /dev/shm is another, full file system: /proc has no room at all."""
    monkeypatch.setattr(machine, "SHARED_MEMORY", Path("/proc"))
    code, lines = check(home)
    assert code == 2
    [line] = lines
    assert line.startswith("sync.bucket_mib: the weights travel through ")
    assert "in /proc, which has 0.00 GiB free" in line


def test_s3_a_package_of_another_version_is_named_with_the_pin():
    """Injected: pins that nothing fulfils."""
    assert version_fault("megatron-core", "0.1") == (
        "megatron-core is installed as 0.16.1, not as 0.1; install it as launch/install.sh does (pip install "
        "megatron-core==0.1, see requirements.txt)"
    )
    assert version_fault("no-such-package", "1.0").startswith("no-such-package is not installed; install it ")


def test_the_pins_are_those_of_the_requirements_files():
    root = Path(__file__).parents[2]
    lines = [line for file in root.glob("requirements*.txt") for line in file.read_text().splitlines()]
    assert all(f"{package}=={pin}" in lines for package, pin in (TRAINER_PINS | ENGINE_PINS | COPIES_PINS).items())


def test_s4_every_engine_argument_that_the_spec_decides_is_guarded(home):
    """Injected: a spec with other values; what changes with it on the command line, extra_args may not set."""
    plain = load_spec(home / "spec.yaml")
    other = load_spec(
        home / "spec.yaml",
        [
            "model.path=other",
            "model.dtype=bf16",
            "engine.tensor_parallel=2",
            "engine.context_tokens=512",
            "engine.max_total_tokens=777",
            "rollout.max_running_requests=7",
            "seed=99",
        ],
    )
    pairs = [server_arguments(spec, 0, Device.CPU, 1) for spec in (plain, other)]
    changed = {pairs[0][place - 1] for place, (a, b) in enumerate(zip(*pairs, strict=True)) if a != b}
    assert changed
    assert changed <= ENGINE_ARGUMENTS.keys()


def test_s4_the_arguments_of_an_engines_layout_are_guarded_too(home):
    """Injected: a layout over several GPUs; what it adds to the command line, extra_args may not set."""
    spread = ["engine.tensor_parallel=4", "engine.expert_parallel=2", "engine.data_parallel_attention=2"]
    plain, other = (
        set(server_arguments(load_spec(home / "spec.yaml", overrides), 0, Device.CUDA, 1))
        for overrides in ([], [*spread, "engine.replicated_mlp=true", "cluster.placement=disaggregated"])
    )
    added = {argument for argument in other - plain if argument.startswith("--")}
    assert added == {"--ep-size", "--attn-dp-size", "--moe-dense-tp-size"}
    assert {*added, "--base-gpu-id"} <= ENGINE_ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--port=1", "--port would change where the engine listens, which slimerl sets by itself; remove it"),
        ("--po=1", "--po would change where the engine listens, which slimerl sets by itself; remove it"),
        (
            "--host=0.0.0.0",
            "--host would change where the engine listens (cluster.network), which slimerl sets by itself",
        ),
        (
            "--admin-api-key=x",
            "--admin-api-key would change the engine's keys, which slimerl sets by itself; remove it",
        ),
        ("--config=args.yaml", "--config would change all arguments of the engine, which slimerl sets by itself"),
        ("''", "'' is no argument; remove it"),
        ("stray", "'stray' is no option; begin with one, as in [--name, value]"),
    ],
)
def test_s4_what_the_launcher_sets_itself_may_not_be_given_again(home, given, told):
    code, lines = check(home, f"engine.extra_args=[{given}]")
    assert code == 2
    assert lines[0].startswith("engine.extra_args: ")
    assert any(told in line for line in lines)


def test_s4_whatever_ties_a_server_to_its_role_is_guarded(home):
    """Injected: another port, another machine; what changes with them on the command line, extra_args may not set."""
    spec = load_spec(home / "spec.yaml", ["cluster.gpus_per_node=1", "engine.tensor_parallel=2"])
    pairs = [
        server_arguments(spec, 0, Device.CPU, port, Place(address, node, "first"))
        for port, address, node in ((1, "here", 0), (2, "there", 1))
    ]
    changed = {pairs[0][place - 1] for place, (a, b) in enumerate(zip(*pairs, strict=True)) if a != b}
    assert changed == {"--host", "--port", "--node-rank"}
    assert changed <= OWN_ARGUMENTS.keys()


def test_s4_what_the_launcher_only_prefers_may_be_set(home):
    assert check(home, "engine.extra_args=[--attention-backend, torch_native, --chunked-prefill-size=64]") == (0, [])


def test_s4_an_option_that_sglang_does_not_know_is_told_before_an_engine_ends_with_it(home):
    code, lines = check(home, "engine.extra_args=[--atention-backend, torch_native]")
    assert code == 2
    assert "--atention-backend is no option of the installed SGLang; did you mean --attention-backend?" in lines[0]


def test_s3_a_port_in_use_is_named(home):
    """Injected: a listener on rollout.port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert check(home, f"rollout.port={port}") == (
            2,
            [f"rollout.port = {port}: Address already in use on 127.0.0.1; set another, or 0 for a free one"],
        )
    assert check(home, f"rollout.port={port}") == (0, [])


def test_s3_a_port_in_use_is_asked_for_where_the_service_will_listen(home, monkeypatch):
    """Injected: roles listen at an address of their own, and there the port is taken; then there is no address."""
    monkeypatch.setattr(machine, "own_address", lambda network: "127.0.0.2" if network == "hostname" else "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert check(home, f"rollout.port={port}") == (0, [])
        code, [line] = check(home, f"rollout.port={port}", "cluster.network=hostname")
    assert (code, line) == (
        2,
        f"rollout.port = {port}: Address already in use on 127.0.0.2; set another, or 0 for a free one",
    )

    def no_address(network):
        raise NoAddress("the machine's name has no address")

    monkeypatch.setattr(machine, "own_address", no_address)
    assert check(home) == (2, ["cluster.network = loopback: the machine's name has no address"])
