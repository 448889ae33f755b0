"""A spec with its model and data in a directory of their own, all of them sound, for tests that spoil one thing."""

import json
import shutil

import pytest
import yaml
from preflight_home import ROW, write_rows
from tiny_models import make_tiny_model

from slimerl.conductor.preflight import machine
from slimerl.training.memory_estimate import GIB


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("sound"), tied=True)


@pytest.fixture
def home(tmp_path, sound_model, monkeypatch):
    """A directory with a spec, a model and data, all of them sound."""
    shutil.copytree(sound_model, tmp_path / "model")
    write_rows(tmp_path, ROW, ROW | {"id": "b"})
    tree = {
        "name": "tiny",
        "output_dir": "run",
        "model": {"path": "model"},
        "data": {"train_path": "train.jsonl", "eval_path": "held.jsonl", "max_prompt_tokens": 16},
        "training": {"steps": 2, "prompts_per_step": 8},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 24},
        "engine": {"context_tokens": 256},
    }
    (tmp_path / "held.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    # how much this machine has free just now is not what is tested here
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 64 * GIB)
    return tmp_path
