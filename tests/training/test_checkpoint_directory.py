"""Names, manifests, choice and removal of checkpoints, with every fault that a disk or a kill can leave."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from slimerl.training.checkpoint import directory
from slimerl.training.checkpoint.directory import Damaged, Manifest

CONTENT = {"weights.bin": bytes(range(256)) * 40, "common.pt": b"small", "source.msgpack": b""}


def write(root, step):
    """A whole checkpoint, as the trainer writes it."""
    partial = directory.start_partial(root, step)
    for name, data in CONTENT.items():
        directory.write_flushed(partial / name, data)
    files = {name: directory.entry_of(partial / name) for name in CONTENT}
    directory.write_manifest(partial, Manifest(step, step, files, {"data": 2}, {"seed": 1}))
    return directory.complete(root, step)


def faults(path):
    """What verification says, manifest included."""
    try:
        return directory.faults(path, directory.read_manifest(path).files)
    except Damaged as error:
        return [str(error)]


def test_what_was_written_is_whole_and_the_newest_is_derived_from_the_names(tmp_path):
    for step in (9, 10, 100):
        assert faults(write(tmp_path, step)) == []
    assert directory.complete_steps(tmp_path) == [100, 10, 9]
    assert directory.read_manifest(tmp_path / "step-10").identity == {"seed": 1}
    assert directory.complete_steps(tmp_path / "none") == []


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def truncate(path, size):
    os.truncate(path, size)


DAMAGES = {
    "a bit of the weights": (lambda path: flip(path / "weights.bin", 5000), "weights.bin has changed"),
    "the last bit of the weights": (lambda path: flip(path / "weights.bin", -1, 7), "weights.bin has changed"),
    "a truncated file": (lambda path: truncate(path / "weights.bin", 100), "100 bytes instead of 10240"),
    "an emptied file": (lambda path: truncate(path / "common.pt", 0), "0 bytes instead of 5"),
    "a grown file": (lambda path: (path / "source.msgpack").write_bytes(b"x"), "1 bytes instead of 0"),
    "a missing file": (lambda path: (path / "common.pt").unlink(), "common.pt: No such file"),
    "a missing manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "a truncated manifest": (lambda path: truncate(path / "manifest.json", 50), "manifest.json cannot be read"),
    "a manifest nested beyond all measure": (
        lambda path: replace_text(path / "manifest.json", '"identity": {', '"identity": {"a":' + "[" * 100_000),
        "manifest.json cannot be read",
    ),
    "another step in the manifest": (
        lambda path: replace_text(path / "manifest.json", '"step": 7', '"step": 8'),
        "does not match its own digest",
    ),
    "another digest in the manifest": (
        lambda path: flip(path / "manifest.json", (path / "manifest.json").read_bytes().index(b'"digest": "') + 12),
        "digest|cannot be read",
    ),
}


def replace_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_c2_damage_is_found_and_named(tmp_path, damage):
    """Injected: one damage to a whole checkpoint."""
    path = write(tmp_path, 7)
    injure, said = DAMAGES[damage]
    injure(path)
    [fault] = faults(path)
    assert any(part in fault for part in said.split("|")), fault


@pytest.mark.parametrize("position", range(0, 900, 37))
def test_c2_no_bit_of_the_manifest_can_change_unseen(tmp_path, position):
    """Injected: one bit of the manifest flipped."""
    path = write(tmp_path, 7)
    before = directory.read_manifest(path)
    flip(path / "manifest.json", position % (path / "manifest.json").stat().st_size, position % 8)
    with contextlib.suppress(Damaged):
        assert directory.read_manifest(path) == before, "white space may differ, what it says may not"


def test_c2_ranks_that_share_the_reading_find_together_what_one_would(tmp_path):
    """Injected: a bit flipped in a file that only one of them reads."""
    path = write(tmp_path, 7)
    flip(path / "weights.bin", 0)
    files = directory.read_manifest(path).files
    found = [directory.faults(path, files, part, 4) for part in range(4)]
    assert [fault for part in found for fault in part] == directory.faults(path, files) != []


def test_c2_a_torn_write_is_no_checkpoint_and_the_next_write_removes_it(tmp_path):
    """Injected: the writer is killed after the manifest, before the rename."""
    write(tmp_path, 3)
    shutil.copytree(tmp_path / "step-3", tmp_path / "step-6.partial")
    assert directory.complete_steps(tmp_path) == [3]
    assert directory.partial_names(tmp_path) == ["step-6.partial"]
    write(tmp_path, 9)
    assert directory.partial_names(tmp_path) == []


def test_c2_a_damaged_one_is_set_aside_and_its_step_can_be_written_again(tmp_path):
    """Injected: a truncated file in the newest; the run comes to its step a second time."""
    write(tmp_path, 3)
    truncate(write(tmp_path, 6) / "weights.bin", 1)
    directory.set_aside(tmp_path, 6)
    assert directory.complete_steps(tmp_path) == [3]
    assert faults(write(tmp_path, 6)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-6", "step-6.damaged"]


def test_c2_a_checkpoint_that_is_there_is_not_replaced_by_one_of_the_same_step(tmp_path):
    """Injected: a second run writes the same step into the same directory."""
    first = write(tmp_path, 6)
    mark = (first / "manifest.json").stat().st_ino
    with pytest.raises(FileExistsError, match="step-6 is there already"):
        write(tmp_path, 6)
    assert (first / "manifest.json").stat().st_ino == mark
    assert faults(first) == []


@pytest.mark.parametrize("name", ["step-07", "step-٣", "step-³", "step-+7", "step-7 ", "step-"])
def test_c2_a_name_that_is_not_written_like_that_is_no_step(tmp_path, name):
    """Injected: a directory whose name holds another spelling of a number."""
    write(tmp_path, 3)
    (tmp_path / name).mkdir()
    assert directory.complete_steps(tmp_path) == [3]
    assert directory.unusable_names(tmp_path) == [name]


def test_c2_a_link_that_leads_nowhere_is_told_among_what_cannot_be_used(tmp_path):
    """Injected: a checkpoint on a disk that is not mounted, one that is a file, one set aside."""
    write(tmp_path, 0)
    (tmp_path / "step-6").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-7").touch()
    (tmp_path / "step-8.damaged").mkdir()
    (tmp_path / "step-9.partial").mkdir()
    assert directory.complete_steps(tmp_path) == [0]
    assert directory.unusable_names(tmp_path) == ["step-6", "step-7", "step-8.damaged"]


def test_c5_a_full_disk_is_told_with_the_file_that_it_has_no_room_for():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        directory.write_flushed(Path("/dev/full"), b"x")


def test_older_ones_go_once_a_newer_one_is_complete(tmp_path):
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    assert directory.remove_older(tmp_path, 12, keep_last=2) == [6, 3]
    assert directory.complete_steps(tmp_path) == [12, 9]


@pytest.mark.parametrize("damage", ["a truncated file", "a missing file", "a missing manifest"])
def test_c5_older_ones_stay_where_the_newer_one_is_not_what_was_written(tmp_path, damage):
    """Injected: the newest is damaged between its completion and the removal."""
    for step in (3, 6, 9):
        write(tmp_path, step)
    DAMAGES[damage][0](tmp_path / "step-9")
    with pytest.raises((Damaged, OSError)):
        directory.remove_older(tmp_path, 9, keep_last=1)
    assert directory.complete_steps(tmp_path) == [9, 6, 3]
