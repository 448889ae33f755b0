"""What a conversion does when something is wrong: the error says what, the source stays, nothing half-written loads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from converted_models import all_tensors, assert_same, contents, write_checkpoint, write_files, write_in_fp8
from safetensors.torch import save_file
from typer.testing import CliRunner

from slimerl.conversion.convert import Options, convert
from slimerl.resharding.families import family_of
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint, read_config

SMALL_FILES = Options(shard_bytes=60_000)
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def given(tmp_path):
    return write_checkpoint(tmp_path / "given", "deepseek_v3", files=3)


def refused(source: Path, target: Path, message: str, options: Options = SMALL_FILES) -> None:
    """The conversion fails with that message, reads the source alone, and leaves nothing under the target's name."""
    before = contents(source)
    with pytest.raises((CheckpointError, OSError), match=message):
        convert(source, target, options)
    assert contents(source) == before
    assert not target.exists()
    with pytest.raises(CheckpointError), HfCheckpoint(target.with_name(f".{target.name}.converting")):
        pass


def damage(file: Path, change: str) -> None:
    data = bytearray(file.read_bytes())
    if change == "truncated":
        del data[-100:]
    elif change == "header":
        data[9] ^= 0xFF
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("change", ["truncated", "header"])
def test_c2_a_damaged_safetensors_file_is_refused_by_its_name(tmp_path, given, change):
    damage(given / SHARD, change)
    refused(given, tmp_path / "target", SHARD)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_w11_a_scale_that_is_no_number_is_refused_by_its_name(tmp_path, given, value):
    """Fault: a block would come out as no numbers, in a checkpoint that looks like any other."""
    write_in_fp8(given, block=16)
    scales = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    tensors = all_tensors(given)
    tensors[scales][-1, -1] = value
    write_files(given, tensors, files=3)
    refused(given, tmp_path / "target", rf"{scales} .*{value}")


def test_fp8_that_the_config_does_not_tell_of_is_refused(tmp_path, given):
    """Fault: weights would come out without their scales."""
    tensors = all_tensors(given)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write_files(given, tensors, files=3)
    refused(given, tmp_path / "target", rf"{name} is torch.float8_e4m3fn.*quantization_config")


def test_a_tensor_that_the_index_lacks_is_named(tmp_path, given):
    index = json.loads((given / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.mlp.gate.weight"]
    (given / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(given, tmp_path / "target", r"disagree about model\.layers\.1\.mlp\.gate\.weight")


def test_a_tensor_that_is_in_no_file_is_named(tmp_path):
    model = write_checkpoint(tmp_path / "given", "qwen3")
    tensors = all_tensors(model)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    refused(model, tmp_path / "target", r"lacks model\.layers\.2\.mlp\.down_proj\.weight")


def test_half_of_a_prediction_layer_is_refused(tmp_path):
    model = write_checkpoint(tmp_path / "given", "glm4_moe")
    tensors = all_tensors(model)
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    refused(model, tmp_path / "target", r"lacks model\.layers\.3\.eh_proj\.weight")


def test_a_second_copy_that_is_none_is_refused(tmp_path):
    model = write_checkpoint(tmp_path / "given", "llama")
    tensors = all_tensors(model)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    refused(model, tmp_path / "target", r"lm_head\.weight should repeat model\.embed_tokens\.weight")


@pytest.mark.parametrize("change", ["truncated", "flipped", "header"])
def test_c2_a_damaged_file_of_a_converted_checkpoint_is_refused_by_its_digest(tmp_path, given, change):
    """Fault: `flipped` is one bit of a weight, which no format notices."""
    convert(given, tmp_path / "megatron", SMALL_FILES)
    damage(tmp_path / "megatron" / "__3_0.distcp", change)
    if change == "header":
        # the tensors are whole, but their archive is not
        (tmp_path / "megatron" / "__3_0.distcp").write_bytes(b"\0" * 700 + b"x" * 100)
    refused(tmp_path / "megatron", tmp_path / "target", r"damaged")


def test_c2_a_flipped_bit_of_an_index_is_refused(tmp_path, given):
    convert(given, tmp_path / "megatron", SMALL_FILES)
    damage(tmp_path / "megatron" / ".metadata", "flipped")
    refused(tmp_path / "megatron", tmp_path / "target", r"content of \.metadata has changed")


def test_c2_a_converted_checkpoint_without_its_manifest_is_refused(tmp_path, given):
    convert(given, tmp_path / "megatron", SMALL_FILES)
    (tmp_path / "megatron" / "manifest.json").unlink()
    refused(tmp_path / "megatron", tmp_path / "target", r"lost its manifest\.json")


class Explosive:
    """Unpickling it would write a file."""

    def __reduce__(self):
        return exec, ("open('exploded', 'w')",)


def test_an_index_that_would_run_code_is_refused(tmp_path, given, monkeypatch):
    import pickle

    convert(given, tmp_path / "megatron", SMALL_FILES)
    for name in ("manifest.json", "conversion.json"):
        (tmp_path / "megatron" / name).unlink()
    shutil.move(tmp_path / "megatron" / "hf", tmp_path / "hf")
    (tmp_path / "megatron" / ".metadata").write_bytes(pickle.dumps(Explosive()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"builtins\.exec"):
        convert(tmp_path / "megatron", tmp_path / "target", Options(like=given))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("direction", ["to Megatron", "to Hugging Face"])
def test_c2_a_disk_that_does_not_give_back_what_was_written_is_noticed(tmp_path, given, direction):
    """Fault: one bit of the only file changes after the last byte was written, before it is read back."""
    source, file = given, tmp_path / ".target.converting" / "__0_0.distcp"
    if direction == "to Hugging Face":
        source, file = tmp_path / "megatron", file.with_name("model.safetensors")
        convert(given, source)
    left = [0]

    def started(stage: str, total: int) -> None:
        left[0] = total

    def progress(stage: str, count: int) -> None:
        left[0] -= count if stage == "converted" else 0
        if left[0] == 0 and stage == "converted":
            damage(file, "flipped")

    options = Options(workers=1, started=started, progress=progress)
    refused(source, tmp_path / "target", r"the disk does not give back what was written", options)


IN_A_PROCESS = """
import os, resource, signal, sys
from pathlib import Path
from slimerl.conversion.convert import Options, convert
source, target, how, limit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
verified = 0
def progress(stage, count):
    global verified
    verified += count if stage == "verified" else 0
    if verified > limit and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if verified > limit and how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    convert(source, target, Options(workers=1, shard_bytes=60_000, progress=progress))
except OSError as error:
    sys.exit(f"OSError: {error}")
"""


def in_a_process(source: Path, target: Path, how: str, limit: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IN_A_PROCESS, str(source), str(target), how, str(limit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("direction", ["to Megatron", "to Hugging Face"])
def test_c2_killed_in_the_middle_a_conversion_goes_on_behind_the_last_verified_file(tmp_path, given, direction):
    """Fault: SIGKILL when half of the bytes are verified."""
    source = given
    if direction == "to Hugging Face":
        source = tmp_path / "megatron"
        convert(given, source, SMALL_FILES)
    before = contents(source)
    half = sum(tensor.nbytes for tensor in all_tensors(given).values()) // 2
    assert in_a_process(source, tmp_path / "target", "kill", half).returncode == -9
    assert not (tmp_path / "target").exists()
    workplace = tmp_path / ".target.converting"
    assert not {"config.json", ".metadata", "metadata.json"} & {path.name for path in workplace.iterdir()}
    done = [json.loads(line)["file"] for line in (workplace / ".journal").read_text().splitlines()[1:]]
    times = {name: (workplace / name).stat().st_mtime_ns for name in done}
    assert len(done) > 1
    report = convert(source, tmp_path / "target", SMALL_FILES)
    assert report.kept_files == len(done) < report.files
    assert {name: (tmp_path / "target" / name).stat().st_mtime_ns for name in done} == times
    assert contents(source) == before
    assert not workplace.exists()
    if direction == "to Megatron":
        convert(tmp_path / "target", tmp_path / "back")
    assert_same(given, tmp_path / ("back" if direction == "to Megatron" else "target"))


def test_c2_a_finished_file_that_was_damaged_since_is_written_again(tmp_path, given):
    half = sum(tensor.nbytes for tensor in all_tensors(given).values()) // 2
    in_a_process(given, tmp_path / "target", "kill", half)
    workplace = tmp_path / ".target.converting"
    done = [json.loads(line)["file"] for line in (workplace / ".journal").read_text().splitlines()[1:]]
    damage(workplace / done[0], "flipped")
    assert convert(given, tmp_path / "target", SMALL_FILES).kept_files == len(done) - 1
    convert(tmp_path / "target", tmp_path / "back")
    assert_same(given, tmp_path / "back")


def test_c2_what_was_done_of_another_source_is_not_used(tmp_path, given):
    half = sum(tensor.nbytes for tensor in all_tensors(given).values()) // 2
    in_a_process(given, tmp_path / "target", "kill", half)
    changed = {name: tensor + 1 for name, tensor in all_tensors(given).items()}
    for file in sorted(given.glob("*.safetensors")):
        with HfCheckpoint(given) as checkpoint:
            names = [name for name in checkpoint if checkpoint.file_of(name) == file.name]
        save_file({name: changed[name] for name in names}, file)
    assert convert(given, tmp_path / "target", SMALL_FILES).kept_files == 0
    convert(tmp_path / "target", tmp_path / "back")
    assert_same(given, tmp_path / "back")


def test_c5_on_a_full_disk_the_error_says_so_and_the_next_call_goes_on(tmp_path, given):
    """Fault: from the middle on no file may grow beyond 1,000 bytes (RLIMIT_FSIZE)."""
    before = contents(given)
    half = sum(tensor.nbytes for tensor in all_tensors(given).values()) // 2
    ended = in_a_process(given, tmp_path / "target", "full", half)
    assert ended.returncode == 1
    assert "cannot be written: [Errno 27]" in ended.stderr
    assert "bytes are free there. What is done stays in" in ended.stderr
    assert contents(given) == before
    assert not (tmp_path / "target").exists()
    assert convert(given, tmp_path / "target", SMALL_FILES).kept_files > 0
    convert(tmp_path / "target", tmp_path / "back")
    assert_same(given, tmp_path / "back")


def test_c5_a_disk_without_room_is_refused_before_the_first_byte(tmp_path, given, monkeypatch):
    room = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    refused(given, tmp_path / "target", r"are to be written .* and 100000 are free")


def test_c5_room_is_asked_for_indexes_and_records_too(tmp_path, given, monkeypatch):
    """Fault: the disk has room for the tensors' files alone."""
    convert(given, tmp_path / "whole", SMALL_FILES)
    written = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    room = shutil.disk_usage(tmp_path)._replace(free=written)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    refused(given, tmp_path / "target", rf"are to be written .* and {written} are free")
    assert not (tmp_path / ".target.converting").exists(), "there is nothing to go on from"


@pytest.mark.parametrize("small", [".metadata", "common.pt", "metadata.json", "conversion.json", "manifest.json"])
def test_c5_a_disk_that_is_full_at_the_last_step_says_so_and_the_next_call_goes_on(tmp_path, given, small):
    """Fault: the device of that one small file has no room (/dev/full)."""

    def progress(stage: str, _: int) -> None:
        if stage == "verified" and not (tmp_path / ".target.converting" / small).is_symlink():
            (tmp_path / ".target.converting" / small).symlink_to("/dev/full")

    with pytest.raises(OSError, match=r"cannot be written: .* What is done stays in") as raised:
        convert(given, tmp_path / "target", Options(progress=progress))
    assert "No space left on device" in str(raised.value)
    (tmp_path / ".target.converting" / small).unlink()
    assert convert(given, tmp_path / "target").kept_files == 1


@pytest.mark.parametrize(("damaged", "stays"), [("model.embed_tokens.weight", False), ("model.norm.weight", True)])
def test_a_refused_source_leaves_nothing_or_says_what_it_leaves(tmp_path, given, damaged, stays):
    convert(given, tmp_path / "megatron", SMALL_FILES)
    content = all_tensors(given)[damaged].view(torch.uint8).numpy().tobytes()
    (file,) = (file for file in (tmp_path / "megatron").glob("*.distcp") if content in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(content, bytes([content[0] ^ 1]) + content[1:]))
    with pytest.raises(CheckpointError, match=rf"{damaged} has digest .* it is damaged; use a copy") as raised:
        convert(tmp_path / "megatron", tmp_path / "target", Options(workers=1, shard_bytes=60_000))
    assert (".target.converting: the next call uses or replaces it" in str(raised.value)) == stays
    assert (tmp_path / ".target.converting").exists() == stays


def test_an_existing_target_stays_unless_it_is_to_be_overwritten(tmp_path, given):
    convert(given, tmp_path / "megatron", SMALL_FILES)
    kept = contents(tmp_path / "megatron")
    other = write_checkpoint(tmp_path / "other", "qwen3")
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(other, tmp_path / "megatron")
    damage(other / "model.safetensors", "truncated")
    with pytest.raises(CheckpointError):
        convert(other, tmp_path / "megatron", Options(overwrite=True))
    assert contents(tmp_path / "megatron") == kept
    again = write_checkpoint(tmp_path / "again", "qwen3")
    convert(again, tmp_path / "megatron", Options(overwrite=True))
    convert(tmp_path / "megatron", tmp_path / "back")
    assert_same(again, tmp_path / "back")


def test_overwriting_replaces_checkpoints_alone(tmp_path, given):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("…")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        convert(given, tmp_path / "precious", Options(overwrite=True))
    with pytest.raises(CheckpointError, match="lie in each other"):
        convert(given, given / "megatron")
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_two_conversions_to_one_target_do_not_mix(tmp_path, given):
    from slimerl.conversion.workplace import Workplace

    with Workplace((tmp_path / "target").resolve(), "another"), pytest.raises(CheckpointError, match="another process"):
        convert(given, tmp_path / "target")


def test_a_checkpoint_of_a_run_asks_for_the_one_that_it_started_from(tmp_path, given):
    convert(given, tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron" / "hf")
    for name in ("manifest.json", "conversion.json"):
        (tmp_path / "megatron" / name).unlink()
    refused(tmp_path / "megatron", tmp_path / "target", "pass --like HF_DIR")
    other = write_checkpoint(tmp_path / "other", "qwen2")
    with pytest.raises(CheckpointError, match=r"which config\.json asks for"):
        convert(tmp_path / "megatron", tmp_path / "target", Options(like=other))


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Fault: a file, or a stacked tensor, is held in memory as a whole."""
    model = write_checkpoint(tmp_path / "given", "llama")
    config = read_config(model) | {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 20_000}
    (model / "config.json").write_text(json.dumps(config))
    shapes = family_of(config).logical_tensors(config)
    tensors = {each.name: torch.zeros(each.shape, dtype=torch.bfloat16) for each in shapes}
    save_file(tensors, model / "model.safetensors")
    del tensors
    from bench_conversion import measured

    size = (model / "model.safetensors").stat().st_size
    assert size > 150e6
    there = measured(model, tmp_path / "megatron", 2)
    back = measured(tmp_path / "megatron", tmp_path / "back", 2)
    assert max(there.peak_bytes, back.peak_bytes) < 0.25 * size


def test_the_tool_tells_what_it_did_and_what_is_wrong(tmp_path, given):
    from convert_checkpoint import app

    call = [str(given), str(tmp_path / "megatron")]
    assert CliRunner().invoke(app, call).exit_code == 0
    again = CliRunner().invoke(app, call)
    assert again.exit_code == 2
    assert "pass --overwrite" in again.output
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "convert_checkpoint.py megatron/qwen3-30b models/again" in " ".join(shown.split())


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0"])
def test_a_size_of_files_that_is_none_is_refused_by_its_name(tmp_path, given, size):
    from convert_checkpoint import app

    result = CliRunner().invoke(app, [str(given), str(tmp_path / "megatron"), "--shard-gib", size])
    assert result.exit_code == 2
    assert "--shard-gib" in result.output


def test_more_threads_than_a_machine_has_are_refused(tmp_path, given):
    from convert_checkpoint import app

    result = CliRunner().invoke(app, [str(given), str(tmp_path / "megatron"), "--workers", "1000000"])
    assert result.exit_code == 2
    assert "--workers" in result.output
