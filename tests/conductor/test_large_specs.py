"""The specs of large runs: `slimerl check SPEC --plan-only` on a machine without their files and GPUs."""

import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conductor.preflight.model import engine_size_faults
from slimerl.resharding.layouts import EngineLayout, LayoutError
from slimerl.resharding.planner import Topology
from slimerl.spec import RunSpec, load_spec
from slimerl.training.engine_layout import engine_layout, sync_topology

CONFIGS = Path(__file__).parents[2] / "configs"
MOST_CPU_S = 3.0

PUBLISHED = {
    "qwen3_30b_a3b": (30.5, 64),
    "qwen3_235b_a22b": (235.1, 256),
    "glm45_355b": (352.8, 512),
    "deepseek_v3_671b": (671.0, 768),
    "deepseek_v3_671b_colocated": (671.0, 512),
    "kimi_k2_1t": (1026.4, 768),
}
"""Spec → billions of parameters without the prediction layer, GPUs."""


def check(spec: Path, *overrides: str) -> tuple[int, dict[str, str], list[str]]:
    """(exit code, the table's rows, lines on standard error)."""
    result = CliRunner().invoke(app, ["check", str(spec), "--plan-only", *overrides], env={"COLUMNS": "250"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in result.stdout.splitlines() if "│" in line]
    return result.exit_code, dict(rows), result.stderr.splitlines()


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in {text!r}"
    return float(found[1].replace(",", ""))


def test_every_large_spec_is_tried_here():
    """Those whose model is in configs/models, and not in assets."""
    large = {file.stem for file in CONFIGS.glob("*.yaml") if "checkpoints/" in file.read_text()}
    assert large == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_large_spec_is_planned_in_seconds_with_its_figures(name):
    billions, gpus = PUBLISHED[name]
    began = time.process_time()
    code, rows, faults = check(CONFIGS / f"{name}.yaml")
    spent = time.process_time() - began
    assert (code, faults) == (0, [])
    assert spent <= MOST_CPU_S
    spec = load_spec(CONFIGS / f"{name}.yaml")
    parameters = number(rows["model"], r"([\d,]+) parameters")
    assert parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert rows["cluster"].startswith(f"{gpus} GPUs on {gpus // 8} nodes of 8, {spec.cluster.placement}")

    # no rank holds less than its share, and the sync carries every parameter once, in bf16 or in FP8 with its scales
    ranks = spec.training.parallel.world_size
    copies = spec.training.parallel.data // max(1, spec.training.parallel.expert // spec.training.parallel.tensor)
    assert number(rows["parameters, trainer rank"], r"([\d,]+) at most") >= parameters / ranks * max(copies, 1)
    assert number(rows["parameters, engine rank"], r"([\d,]+) ") >= parameters / spec.engine.tensor_parallel
    gigabytes = number(rows["sync, one copy"], r"([\d,.]+) GB")
    bytes_each = gigabytes * 1e9 / parameters
    assert 1.0 < bytes_each < 1.01 if spec.engine.model_path else bytes_each == pytest.approx(2.0, abs=0.005)

    # a node takes in all that its GPUs want, once, by its eight NICs
    seconds = number(rows["sync, lower bound"], r"^([\d.]+) s")
    whole_node = min(1.0, 8 / spec.engine.tensor_parallel)
    if spec.is_colocated:
        assert 0 < seconds < number(rows["parameters, engine rank"], r"\(([\d.]+) GiB") * 2**30 / 50e9
    else:
        assert seconds >= gigabytes * whole_node / 8 / 50 * 0.999
        assert number(rows["sync, most bytes of a NIC"], r"([\d.]+) GB received") / 50 >= seconds * 0.99
    if spec.engine.tensor_parallel <= 8:
        assert seconds == pytest.approx(gigabytes / 8 / 50, rel=0.01)
    assert all(key in rows for key in ("memory, trainer rank", "memory, engine rank", "resumable checkpoint"))


def test_the_command_itself_takes_no_more_with_all_that_python_imports():
    command = [sys.executable, "-m", "slimerl.cli", "check", "configs/deepseek_v3_671b_colocated.yaml", "--plan-only"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True, timeout=100, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= MOST_CPU_S


def test_deepseek_v3_is_planned_for_256_trainer_and_512_engine_gpus_and_for_512_that_they_share():
    apart = load_spec(CONFIGS / "deepseek_v3_671b.yaml")
    assert (apart.training.parallel.world_size, apart.engine_gpus, apart.gpus) == (256, 512, 768)
    shared = load_spec(CONFIGS / "deepseek_v3_671b_colocated.yaml")
    assert (shared.training.parallel.world_size, shared.engine_gpus, shared.gpus) == (512, 512, 512)
    layout = engine_layout(apart.engine)
    assert (layout.tensor, layout.expert, layout.data_attention) == (32, 32, 32)
    assert layout.replicated_dense
    assert layout.replicated_shared


def test_a_trainer_that_cuts_fp8_blocks_syncs_whole_tensors_and_is_told_why_not_shards():
    cut = ("training.parallel.expert=1", "training.parallel.expert_tensor=32")
    code, rows, faults = check(CONFIGS / "deepseek_v3_671b.yaml", *cut)
    assert code == 2
    assert len(faults) == 1
    assert "ipc, disk)" in faults[0], "the way out"
    code, rows, faults = check(CONFIGS / "deepseek_v3_671b.yaml", *cut, "sync.transport=broadcast")
    assert (code, faults) == (0, [])
    assert rows["sync, shard to shard"].startswith("not with this layout: ")
    assert "sync, lower bound" not in rows


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The specs alone, in a directory without files, data and GPUs."""
    for file in CONFIGS.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    shutil.copytree(CONFIGS / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_of_the_machine_is_asked_and_nothing_is_written(elsewhere, monkeypatch):
    def ask(*_: object) -> None:
        raise AssertionError("the machine was asked")

    for name in ("torch.cuda.is_available", "torch.cuda.device_count", "psutil.virtual_memory", "shutil.disk_usage"):
        monkeypatch.setattr(name, ask)
    before = sorted(elsewhere.rglob("*"))
    code, _, faults = check(elsewhere / "glm45_355b.yaml")
    assert (code, faults) == (0, [])
    assert sorted(elsewhere.rglob("*")) == before


FAULTS = {
    "GPUs with too little memory": (
        "deepseek_v3_671b",
        ["cluster.gpu_memory_gib=48"],
        ["an engine rank needs about 52.7 GiB, a GPU has 48.0", "a trainer rank needs about 6"],
    ),
    "memory that trainer and engine cannot share": (
        "deepseek_v3_671b_colocated",
        ["cluster.gpu_memory_gib=40"],
        ["an engine rank needs about 44.2 GiB beside the 1.5 GiB that a trainer rank keeps, a GPU has 40.0",
         "a trainer rank needs about 37.0 GiB (weights 3.7, gradients 7.4, optimizer 16.1, activations 8.3) beside "
         "the 3.6 GiB that an engine rank keeps, a GPU has 40.0",
         "during a sync the weights of a trainer rank (3.7 GiB) and of an engine rank (27.5) lie on the same GPU"],
    ),
    "parts of an MLP less than a block of FP8": (
        "deepseek_v3_671b",
        ["engine.replicated_mlp=false"],
        ["engine.tensor_parallel = 32: model.layers.{layer}.mlp.gate_proj.weight: part 0 of 32 is (576, 7168), and"],
    ),
    "an engine of more GPUs than the model has heads": (
        "qwen3_235b_a22b",
        ["engine.tensor_parallel=128", "engine.replicas=1"],
        ["engine.tensor_parallel = 128 does not divide the model's num_attention_heads = 64; choose a divisor"],
    ),
    "experts that do not divide": (
        "glm45_355b",
        ["engine.tensor_parallel=48", "engine.expert_parallel=48"],
        ["engine.expert_parallel = 48 does not divide the model's 160 experts; choose a divisor"],
    ),
    "a switch that the family does not have": (
        "glm45_355b",
        ["engine.replicated_mlp=true"],
        ["engine.replicated_mlp: SGLang has it for deepseek_v3 and kimi_k2 alone, the model is glm4_moe; remove it"],
    ),
    "shared memory over nodes": (
        "deepseek_v3_671b_colocated",
        ["sync.transport=ipc"],
        ["sync.transport = ipc reaches the engines of one machine, the run has 512 GPUs on nodes of 8; set it to "],
    ),
    "roles on other machines that nobody reaches": (
        "qwen3_235b_a22b",
        ["cluster.network=loopback"],
        ["cluster.network = loopback: the roles of 256 GPUs on nodes of 8 could not reach each other; set it to "],
    ),
    "more engines than shared GPUs": (
        "deepseek_v3_671b_colocated",
        ["engine.replicas=9"],
        ["engine.replicas * engine.tensor_parallel = 576 exceeds the trainer's 512 GPUs, which the engines share"],
    ),
    "an engine that would reach over the end of a node": (
        "qwen3_30b_a3b",
        ["training.parallel.data=1", "training.parallel.expert=2", "training.parallel.tensor=2",
         "training.parallel.pipeline=1", "training.prompts_per_step=8"],
        ["engine 1 would have GPUs 6 to 9 of a node of cluster.gpus_per_node = 8; choose sizes of trainer and engine"],
    ),
    "an engine that may come and would reach over the end of a node": (
        "qwen3_30b_a3b",
        ["training.parallel.data=1", "training.parallel.expert=2", "training.parallel.tensor=2",
         "training.parallel.pipeline=1", "training.prompts_per_step=8", "engine.replicas=1", "engine.elastic.max=2"],
        ["engine 1 would have GPUs 6 to 9 of a node of cluster.gpus_per_node = 8; choose sizes of trainer and engine"],
    ),
    "an engine that does not fill its nodes": (
        "deepseek_v3_671b",
        ["cluster.gpus_per_node=7"],
        ["engine.tensor_parallel = 32 does not fill nodes of cluster.gpus_per_node = 7; choose a multiple of it"],
    ),
    "more GPUs than a sync is planned for": (
        "deepseek_v3_671b",
        ["engine.replicas=100000", "training.parallel.data=1000000", "training.prompts_per_step=1000000"],
        ["training.parallel (tensor * context * pipeline * data) = 32000000 GPUs: a weight sync is planned for up to ",
         "engine.replicas * engine.tensor_parallel = 3200000 GPUs: a weight sync is planned for up to 32768; lower it"],
    ),
    "a node of more GPUs than a sync is planned for": (
        "deepseek_v3_671b",
        ["cluster.gpus_per_node=1000000000"],
        ["cluster.gpus_per_node = 1000000000 GPUs: a weight sync is planned for up to 32768; lower it"],
    ),
    "more memory than there is": (
        "kimi_k2_1t",
        ["cluster.gpu_memory_gib=1e308"],
        ["{here}/kimi_k2_1t.yaml: cluster.gpu_memory_gib: input should be less than or equal to 1000000"],
    ),
    "no published configuration": (
        "kimi_k2_1t",
        ["model.path=checkpoints/kimi_k3"],
        ["model.path: checkpoints/kimi_k3: {here}/models/kimi_k3.json cannot be read ("],
    ),
    "engines of another model": (
        "deepseek_v3_671b",
        ["engine.model_path=checkpoints/fp8/kimi_k2_1t"],
        ["engine.model_path: checkpoints/fp8/kimi_k2_1t is another model than model.path: they differ in beta_fast, "],
    ),
    "a grid that does not divide the model": (
        "deepseek_v3_671b",
        ["training.parallel.pipeline_layout=null"],
        ["training.parallel.pipeline * virtual = 8 does not divide the model's num_hidden_layers = 61"],
    ),
    "groups that do not divide an engine": (
        "deepseek_v3_671b",
        ["engine.data_parallel_attention=5"],
        ["{here}/deepseek_v3_671b.yaml: engine: engine.data_parallel_attention = 5 does not divide the GPUs of an"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_s3_a_plan_that_does_not_hold_is_refused_with_the_key(elsewhere, case):
    """Injected: the fault that the case is named after."""
    name, overrides, expected = FAULTS[case]
    code, _, lines = check(elsewhere / f"{name}.yaml", *overrides)
    assert code == 2
    expected = [text.replace("{here}", str(elsewhere)) for text in expected]
    assert [line[: len(text)] for line, text in zip(lines, expected, strict=True)] == expected


@pytest.mark.parametrize("content", [b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_published_configuration_that_is_none_is_one_line(elsewhere, content):
    (elsewhere / "models" / "kimi_k2_1t.json").write_bytes(content)
    code, _, [line] = check(elsewhere / "kimi_k2_1t.yaml")
    assert code == 2
    assert f"{elsewhere}/models/kimi_k2_1t.json cannot be read (" in line
    assert len(line) < 600


def node_faults(trainer: int, engine: int, engines: int, node: int) -> tuple[RunSpec, list[str]]:
    """What is said of engines behind a trainer, on nodes of `node` GPUs."""
    sizes = [f"engine.tensor_parallel={engine}", f"engine.replicas={engines}", f"cluster.gpus_per_node={node}"]
    of_trainer = [f"training.parallel.data={trainer}", "training.prompts_per_step=64", "training.parallel.expert=1"]
    others = [f"training.parallel.{key}" for key in ("tensor=1", "pipeline=1", "sequence_parallel=false")]
    spec = load_spec(CONFIGS / "qwen3_30b_a3b.yaml", [*sizes, *of_trainer, *others, "engine.expert_parallel=1"])
    return spec, list(engine_size_faults(spec, {"model_type": "qwen3_moe", "num_attention_heads": 12}, cuda=True))


@pytest.mark.parametrize("node", [4, 6])
def test_an_engine_that_reaches_over_the_end_of_a_node_is_found_wherever_it_is(node):
    for trainer, engine, engines in itertools.product((1, 2, 5), (1, 2, 3, 4), (1, 2, 5)):
        spec, faults = node_faults(trainer, engine, engines, node)
        over = [index for index in range(engines) if spec.first_gpu(index) + engine > node]
        assert [fault.split(" would")[0] for fault in faults] == [f"engine {index}" for index in over[:1]]


def test_ten_million_engines_are_looked_at_as_fast_as_one():
    began = time.process_time()
    assert node_faults(8, 1, 10_000_000, 8)[1] == []
    assert time.process_time() - began < MOST_CPU_S


def test_a_sync_of_512_engines_of_32_gpus_is_planned_and_one_that_no_rank_could_plan_is_refused():
    Topology(256, 32, 512).check_scale()
    for trainer, engines, node in ((256, 1025, 8), (32_769, 1, 8), (256, 16, 65_536)):
        with pytest.raises(LayoutError, match="a sync is planned for up to 32768 GPUs of"):
            Topology(trainer, 32, engines, node).check_scale()


def test_engines_that_do_not_fill_a_node_evenly_are_planned_as_nodes_of_their_own():
    assert [sync_topology(8, EngineLayout(tensor), 2, 8).gpus_per_node for tensor in (3, 4, 16)] == [3, 8, 8]


def test_a_published_quantisation_is_the_engines_and_never_the_trainers(elsewhere):
    """Without a checkpoint of their own the engines serve bf16: twice the bytes."""
    _, rows, _ = check(elsewhere / "deepseek_v3_671b.yaml")
    wide = {key: value for key, value in rows.items() if key.startswith(("memory, trainer", "parameters"))}
    spec = elsewhere / "deepseek_v3_671b.yaml"
    spec.write_text(re.sub(r"  model_path: .*\n", "", spec.read_text()))
    code, plain, _ = check(spec, "cluster.gpu_memory_gib=139")
    assert code == 0
    assert plain["sync, one copy"] == "1,342.1 GB"
    assert plain["memory, trainer rank"] == wide["memory, trainer rank"]
    engine = json.loads((elsewhere / "models" / "deepseek_v3_671b.json").read_text())
    assert "quantization_config" in engine
