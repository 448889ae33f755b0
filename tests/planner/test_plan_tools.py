"""`tools/plan_sync.py`: the numbers and the picture of a plan, from a config.json and layouts."""

import json

import plan_sync
import pytest
import typer
from layout_matrix import MATRIX, model_config, shape_of
from planner_models import MOE
from typer.testing import CliRunner

from slimerl.resharding.families import FAMILIES
from slimerl.resharding.layouts import EngineLayout, MegatronLayout


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
