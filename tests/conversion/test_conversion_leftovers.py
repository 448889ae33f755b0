"""What a killed conversion has left takes no room for ever; files that cannot be are refused."""

import json
import shutil
from pathlib import Path

import pytest
from converted_models import all_tensors, write_checkpoint
from test_conversion_faults import SMALL_FILES, in_a_process, refused

from slimerl.conversion.convert import Options, convert


@pytest.fixture
def given(tmp_path):
    return write_checkpoint(tmp_path / "given", "deepseek_v3", files=3)


def test_c5_half_written_files_do_not_take_the_room_that_they_are_written_to_again(tmp_path, given, monkeypatch):
    """Fault: killed in the middle on a disk that holds the target once; the next call asks for more than there is."""
    room = shutil.disk_usage(tmp_path)
    workplace = tmp_path / ".target.converting"

    def free(capacity: int) -> None:
        def left(_: Path):
            taken = [path.stat().st_size for path in workplace.glob("*.distcp")] if workplace.exists() else []
            return room._replace(free=capacity - sum(taken))

        monkeypatch.setattr(shutil, "disk_usage", left)

    free(0)
    with pytest.raises(OSError, match="are to be written") as refusal:
        convert(given, tmp_path / "target", SMALL_FILES)
    half = sum(tensor.nbytes for tensor in all_tensors(given).values()) // 2
    assert in_a_process(given, tmp_path / "target", "kill", half).returncode == -9
    done = len((workplace / ".journal").read_text().splitlines()) - 1
    assert done < len(list(workplace.glob("*.distcp"))), "some are half written"
    free(int(str(refusal.value).split()[0]))
    assert convert(given, tmp_path / "target", SMALL_FILES).kept_files == done


def test_c5_what_a_killed_process_had_replaced_goes_with_the_next_one(tmp_path, given):
    """Fault: killed while it removed what it had replaced, which nobody finds under that name."""
    convert(given, tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron", tmp_path / ".megatron.replaced-123")
    shutil.copytree(tmp_path / "megatron", tmp_path / ".megatron2.replaced-123")
    convert(given, tmp_path / "megatron", Options(overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".megatron2.replaced-123", "given", "megatron"]


def test_an_index_that_names_a_file_that_cannot_be_is_refused(tmp_path, given):
    index = json.loads((given / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "a\0b"
    (given / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(given, tmp_path / "target", "cannot read .*embedded null byte")
