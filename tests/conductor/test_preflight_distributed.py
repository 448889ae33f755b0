"""A distributed checkpoint that the trainer is to start from: what is wrong with it is told before anything starts."""

from preflight_home import change, check
from typer.testing import CliRunner

from slimerl.cli import app
from slimerl.conversion.convert import convert


def test_a_converted_copy_of_the_model_is_taken(home):
    convert(home / "model", home / "megatron")
    assert check(home, "model.megatron_path=megatron") == (0, [])


def test_s3_a_directory_without_a_manifest_is_refused(home):
    """Injected: the Hugging Face checkpoint itself."""
    code, [line] = check(home, "model.megatron_path=model")
    assert code == 2
    assert line.startswith("model.megatron_path: model is no complete distributed checkpoint")
    assert "tools/convert_checkpoint.py" in line


def test_s3_a_converted_checkpoint_of_another_model_is_refused(home):
    """Injected: another epsilon of the norms; every shape is the same."""
    convert(home / "model", home / "megatron")
    change(home / "megatron" / "hf" / "config.json", rms_norm_eps=1e-3)
    assert check(home, "model.megatron_path=megatron") == (
        2,
        [
            "model.megatron_path: megatron is another model than model.path: they differ in layernorm_epsilon",
        ],
    )


def test_the_plan_of_a_run_says_where_its_weights_come_from(home):
    convert(home / "model", home / "megatron")
    shown = CliRunner().invoke(app, ["check", "spec.yaml", "model.megatron_path=megatron"]).stdout
    assert any("trainer's weights" in line and "megatron" in line for line in shown.splitlines())
