"""Paths that the file system refuses are one line each before anything starts: permissions, links, names."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from preflight_home import ROW, check, write_rows

from slimerl.conductor.preflight.disk import disk_faults
from slimerl.conductor.preflight.paths import path_faults
from slimerl.resharding.hf_checkpoint import CheckpointError, HfCheckpoint
from slimerl.spec.load import spec_from_tree

NOBODY = 65534


@pytest.fixture
def open_place():
    """A directory that every user can reach, which pytest's own are not, with a spec's files."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "model").mkdir()
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            (place / "model" / file).write_text("{}")
        write_rows(place, ROW)
        (place / "theirs" / "deep").mkdir(parents=True)
        (place / "out").mkdir()
        (place / "out").chmod(0o777)
        yield place


@contextlib.contextmanager
def as_another_user():
    """Root passes every permission bit."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def spec(place, **sections):
    tree = {
        "name": "paths",
        "output_dir": str(place / "out" / "run"),
        "model": {"path": str(place / "model")},
        "data": {"train_path": str(place / "train.jsonl")},
        "training": {"steps": 2, "prompts_per_step": 8},
    }
    for section, values in sections.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    return spec_from_tree(tree, "test")


def refused(place, **sections):
    with as_another_user():
        return path_faults(spec(place, **sections))


def test_what_everyone_may_read_and_write_passes(open_place):
    assert refused(open_place) == []
    with as_another_user():
        assert list(disk_faults(spec(open_place), None)) == []


KEYS = {
    "output_dir": lambda path: {"output_dir": path},
    "training.export_path": lambda path: {"training": {"export_path": path}},
    "model.path": lambda path: {"model": {"path": path}},
    "model.megatron_path": lambda path: {"model": {"megatron_path": path}},
    "data.train_path": lambda path: {"data": {"train_path": path}},
    "data.eval_path": lambda path: {"data": {"eval_path": path}},
}


@pytest.mark.parametrize("key", KEYS)
def test_a_path_below_a_directory_of_someone_else_is_one_line(open_place, key):
    """Injected: the directory above is closed to this user."""
    (open_place / "theirs").chmod(0o700 if not os.geteuid() else 0)
    path = str(open_place / "theirs" / "deep")
    try:
        [fault] = refused(open_place, **KEYS[key](path))
    finally:
        (open_place / "theirs").chmod(0o755)
    assert fault.startswith(f"{key}: {path}")
    assert "cannot be used (Permission denied); " in fault
    assert f"set {key} to another place" in fault


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors"])
def test_a_file_of_the_model_that_this_user_may_not_read_is_named(open_place, name):
    """Injected: its mode is 000."""
    (open_place / "model" / name).chmod(0)
    [fault] = refused(open_place)
    assert fault.startswith(f"model.path: {open_place}/model/{name} cannot be used (Permission denied); ")


def test_weights_that_may_not_be_read_are_not_called_missing(open_place):
    (open_place / "model" / "model.safetensors").chmod(0)
    with as_another_user(), pytest.raises(CheckpointError, match="Permission denied"):
        HfCheckpoint(open_place / "model")


def test_an_export_beside_which_nothing_can_be_written_is_refused(open_place):
    """Injected: the export's directory is this user's own, the one around it is not."""
    own = open_place / "own"
    own.mkdir()
    own.chmod(0o777)
    open_place.chmod(0o555)
    with as_another_user():
        [fault] = disk_faults(spec(open_place, training={"export_path": str(own)}), None)
    open_place.chmod(0o755)
    assert fault.startswith(f"training.export_path: {open_place} is not writable (Permission denied)")


def link(home, name, to):
    (home / name).symlink_to(to)


LONG = "x" * 300
PATHS = {
    "a link in a circle as the output": (
        lambda home: link(home, "circle", "circle"),
        ["output_dir=circle"],
        "output_dir: circle cannot be used (Too many levels of symbolic links); set output_dir to another place",
    ),
    "a link in a circle as the data": (
        lambda home: link(home, "circle", "circle"),
        ["data.train_path=circle"],
        "data.train_path: circle cannot be used (Too many levels of symbolic links); mend that, or set data.train_path "
        "to another place",
    ),
    "a link in a circle as the model": (
        lambda home: link(home, "circle", "circle"),
        ["model.path=circle"],
        "model.path: circle cannot be used (Too many levels of symbolic links); mend that, or set model.path to "
        "another place",
    ),
    "a link that leads nowhere as the output": (
        lambda home: link(home, "gone", "nowhere"),
        ["output_dir=gone"],
        "output_dir: {home}/gone is a link to nowhere, which is not there; make that directory, or set output_dir to "
        "another place",
    ),
    "a link that leads nowhere as the export": (
        lambda home: link(home, "gone", "nowhere"),
        ["training.export_path=gone"],
        "training.export_path: {home}/gone is a link to nowhere, which is not there; make that directory, or set "
        "training.export_path to another place",
    ),
    "a name that is too long for the output": (
        lambda home: None,
        [f"output_dir=new/{LONG}"],
        f"output_dir: the name {'x' * 200}… is longer than 255 bytes; shorten it",
    ),
    "a name that is too long for the data": (
        lambda home: None,
        [f"data.train_path={LONG}"],
        f"data.train_path: {'x' * 200}… cannot be used (File name too long); mend that, or set data.train_path to "
        "another place",
    ),
    "a character that no path has": (
        lambda home: None,
        ['output_dir="a\\0b"'],
        "spec.yaml: output_dir: a path has no NUL character; remove it (found 'a\\x00b')",
    ),
    "a pipe as a file of the model": (
        lambda home: ((home / "model" / "config.json").unlink(), os.mkfifo(home / "model" / "config.json")),
        [],
        "model.path: model/config.json is a pipe or a device, and is to be read more than once; name a file",
    ),
    "a device as the data": (
        lambda home: None,
        ["data.train_path=/dev/null"],
        "data.train_path: /dev/null is a pipe or a device, and is to be read more than once; name a file",
    ),
    "half of a character": (
        lambda home: None,
        ['model.path="a\\ud800b"'],
        "spec.yaml: model.path: a path is text that the file system can write; correct it (found 'a\\ud800b')",
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_no_file_system_takes_is_one_line(home, case):
    """Injected: the path that the case is named after."""
    prepare, overrides, expected = PATHS[case]
    prepare(home)
    assert check(home, *overrides) == (2, [expected.format(home=home)])


def test_an_export_over_a_mount_is_refused(home):
    """A rename cannot replace it."""
    code, lines = check(home, "training.export_path=/dev/shm")
    assert code == 2
    assert lines == [
        "training.export_path: /dev/shm is where a disk is mounted and cannot be replaced; set training.export_path to "
        "a directory in it"
    ]


def test_an_export_to_where_a_link_leads_is_sound(home):
    (home / "disk").mkdir()
    link(home, "linked", "disk")
    assert check(home, "training.export_path=linked") == (0, [])
