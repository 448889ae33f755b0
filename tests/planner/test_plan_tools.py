"""`tools/plan_sync.py`: the numbers and the picture of a plan, from a config.json and layouts."""

import json
from pathlib import Path

import plan_sync
import pytest
import typer
from layout_matrix import MATRIX, model_config, shape_of
from planner_models import MOE
from typer.testing import CliRunner

from slimerl.resharding.families import FAMILIES
from slimerl.resharding.layouts import EngineLayout, MegatronLayout, ModuleNames


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(plan_sync.main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_it_prints_the_plan_and_draws_a_bar_for_every_nic(command, tmp_path):
    config, picture = tmp_path / "config.json", tmp_path / "sync.svg"
    config.write_text(json.dumps(MOE))
    layouts = ("--trainer", "tensor=2,data=2,expert=4,expert_tensor=1", "--engine", "tensor=4,expert=4")
    result = command(config, *layouts, "--replicas", 3, "--gpus-per-node", 4, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert "simulated, s" in result.output
    # A background, the trainer's 4 NICs, and the engines' 12 twice: what they receive and what they pass on.
    assert picture.read_text().count("<rect") == 1 + 4 + 2 * 12


def test_an_unknown_size_is_refused_naming_those_there_are(command, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MOE))
    result = command(config, "--trainer", "tensr=2")
    assert result.exit_code != 0
    with pytest.raises(typer.BadParameter, match=r"'tensr' is no key of MegatronLayout.*tensor"):
        plan_sync.parsed("tensr=2", MegatronLayout)


LAYOUTS = ("--trainer", "tensor=2,data=2,expert=4,expert_tensor=1", "--engine", "tensor=4,expert=4")
SPEC = Path(__file__).parents[2] / "configs" / "qwen3_30b_a3b.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainer", "tensor=3"), "cannot be cut into 3 equal parts"),
        (("--trainer", "tensor=x"), "tensor=x: it is a whole number"),
        (("--trainer", "tensor"), "tensor=: it is a whole number"),
        (("--trainer", "tensor=true"), "tensor=true: it is a whole number"),
        (("--trainer", "tensor=0"), "tensor = 0 must be at least 1"),
        (("--trainer", "tensor=-2"), "tensor = -2 must be at least 1"),
        (("--trainer", "tensor=2,tensor=4"), "tensor is given twice"),
        (("--trainer", "pipeline=2,stage_layers=-1/5"), "stage_layers=-1/5: it is the layers of each stage"),
        (("--engine", "expert_map=1"), "expert_map=1: a map of experts cannot be given here"),
        (("--trainer", "stage_layers=a"), "stage_layers=a: it is the layers of each stage"),
        (("--trainer", "names=te"), "names=te: it is one of local, transformer_engine"),
        (("--engine", "replicated_dense=2"), "replicated_dense=2: it is"),
        ((*LAYOUTS, "--replicas", 0), "--replicas"),
        ((*LAYOUTS, "--replicas", 100_000), "planned for up to 32768 GPUs of all engines, not 400000"),
        ((*LAYOUTS, "--gpus-per-node", 0), "--gpus-per-node"),
        ((*LAYOUTS, "--gpus-per-node", 3), "an engine of 4 GPUs on nodes of 3"),
        *(((*LAYOUTS, "--nic-gb-s", speed), "--nic-gb-s") for speed in ("0", "-5", "nan", "inf")),
        ((*LAYOUTS, "--picture", "/nonexistent/x.svg"), "--picture /nonexistent/x.svg: no file can be written there"),
    ],
)
def test_a_size_that_is_none_is_refused_in_a_line(command, tmp_path, arguments, message):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MOE))
    result = command(config, *arguments)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert message in " ".join(result.output.split())


def test_module_names_are_chosen_by_their_name():
    assert plan_sync.parsed("names=transformer_engine", MegatronLayout) == {"names": ModuleNames.TRANSFORMER_ENGINE}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "missing.json"),
        ("missing.yaml", None, "missing.yaml"),
        ("torn.json", "{", "torn.json is no JSON"),
        ("list.json", "[]", "list.json holds list"),
        ("deep.json", "[" * 200_000, "deep.json is no JSON"),
        ("other.json", '{"model_type": "bert"}', "bert"),
        ("long.json", json.dumps(MOE | {"num_hidden_layers": 10**9}), "num_hidden_layers = 1000000000 is more than"),
        ("wide.json", json.dumps(MOE | {"num_experts": 10**9}), "num_experts = 1000000000 is more than any model has"),
        ("README.md", "# A text", "README.md"),
    ],
)
def test_a_file_that_is_neither_spec_nor_configuration_is_refused_by_its_name(
    command, tmp_path, name, content, message
):
    if content is not None:
        (tmp_path / name).write_text(content)
    result = command(tmp_path / name)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    "options", [("--trainer", "tensor=2"), ("--engine", "tensor=4"), ("--replicas", 2), ("--prediction",)]
)
def test_options_of_a_configuration_are_refused_beside_a_spec(command, options):
    """Fault: the spec's own sizes are planned, and the option is dropped without a word."""
    result = command(SPEC, *options)
    assert result.exit_code == 2
    assert f"{options[0]}: with a run spec its own sizes count" in " ".join(result.output.split())


def test_sizes_are_read_as_the_layouts_want_them():
    text = "tensor=4,pipeline=2,virtual=2,stage_layers=3/2|2/1"
    assert MegatronLayout(**plan_sync.parsed(text, MegatronLayout)).stage_layers == ((3, 2), (2, 1))
    assert EngineLayout(**plan_sync.parsed("tensor=8,replicated_dense=true", EngineLayout)).replicated_dense


def test_the_matrix_has_as_many_layouts_of_each_kind_as_the_goals_ask_for():
    assert len(MATRIX) >= 30
    assert len({case.name for case in MATRIX}) == len(MATRIX)
    assert {model_config(case.model)["model_type"] for case in MATRIX} == FAMILIES.keys()
    assert sum(case.name.startswith("t: ") for case in MATRIX) >= 8
    sizes = {
        (shape.train.world_size, shape.engine.world_size * shape.topology.replicas) for shape in map(shape_of, MATRIX)
    }
    assert {(256, 512), (128, 512), (512, 128)} <= sizes
    assert any(case.train.stage_layers for case in MATRIX), "uneven pipelines"
    assert any(case.train.expert_tensor_size not in (1, case.train.tensor) for case in MATRIX), "ETP that is not TP"
    assert any(case.engine.expert > 8 for case in MATRIX), "experts over several nodes"
    assert any(case.engine.pipeline > 1 for case in MATRIX), "engines that are pipelines"
    by_heads = [(case.engine, model_config(case.model)["num_key_value_heads"]) for case in MATRIX]
    assert any(heads < engine.tensor // engine.data_attention for engine, heads in by_heads), (
        "fewer KV heads than ranks"
    )
