"""`slimerl spec get`: what scripts ask a spec."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.spec import SpecError, load_spec
from slimerl.spec.lookup import value_text

CONFIGS = Path(__file__).parents[2] / "configs"
SPEC = CONFIGS / "deepseek_v3_671b.yaml"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("name", "deepseek-v3-671b"),
        ("engine.replicas", "16"),
        ("training.parallel.expert", "32"),
        ("training.parallel.world_size", "256"),
        ("trainer_nodes", "32"),
        ("engine_nodes", "64"),
        ("nodes_per_engine", "4"),
        ("ranks_per_node", "8"),
        ("is_colocated", "false"),
        ("run_dir", "runs/deepseek-v3-671b"),
        ("data.system_prompt", ""),
        ("engine.extra_args", ""),
    ],
)
def test_a_key_or_what_follows_from_the_keys_is_printed_as_a_shell_wants_it(name, text):
    assert value_text(load_spec(SPEC), name) == text


def test_overrides_count():
    spec = str(CONFIGS / "deepseek_v3_671b_colocated.yaml")
    result = CliRunner().invoke(app, ["spec", "get", "trainer_nodes", spec, "cluster.gpus_per_node=4"])
    assert (result.exit_code, result.stdout) == (0, "128\n")
    assert value_text(load_spec(Path(spec)), "engine_nodes") == "0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("engine.replica", "the spec has no value 'engine.replica'; did you mean 'engine.replicas'?"),
        ("world_size", "did you mean 'training.parallel.world_size'?"),
        ("cluster", "'cluster' is a section; its values are gpu_memory_gib, gpus_per_node, network, placement, turns"),
        ("name.upper", "the spec has no value 'name.upper'"),
        ("engine.model_dump", "the spec has no value 'engine.model_dump'"),
        ("_fits_together", "the spec has no value '_fits_together'"),
    ],
)
def test_s1_what_is_no_value_is_an_error_that_names_the_nearest(name, message):
    with pytest.raises(SpecError) as error:
        value_text(load_spec(SPEC), name)
    assert message in str(error.value)
